// Preloaded by gloo_threads.py: a memcpy that sleeps before it copies the name ALLREDUCE, so that another thread can
// free the destination first. Everything else is copied at once.

#include <stddef.h>
#include <time.h>

void *memcpy(void *restrict to, const void *restrict from, size_t size) {
    void *result = to;
    if (size == 9 && *(const unsigned long *)from == 0x43554445524c4c41) { // "ALLREDUC"
        const struct timespec pause = {0, 200000};
        nanosleep(&pause, NULL);
    }
    __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(size) : : "memory");
    return result;
}
