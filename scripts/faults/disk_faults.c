/* Disk fault injection: a library, loaded with LD_PRELOAD, that makes file operations of the C library fail or hang,
 * and moves the wall clock. disk_faults.py compiles it, and writes the rules into a file that all processes map. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define RULES 16

struct rule { /* as disk_faults.py packs it */
    char operation[16];
    char pattern[224];
    int32_t error;   /* errno; 0: only the pause */
    int32_t rank;    /* environment's RANK; -1: any process */
    int32_t times;   /* how often it still strikes; -1: always */
    int32_t seconds; /* pause before; of "clock", by how much it is moved */
    int32_t skip;    /* how many matching operations it still lets pass */
};

static struct rule *rules;

__attribute__((constructor)) static void map_rules(void) {
    const char *path = getenv("DISK_FAULTS");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *mapped = mmap(NULL, RULES * sizeof(struct rule), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (mapped != MAP_FAILED)
        rules = mapped;
}

/* Whether an operation is to fail: then errno says how. A relative path is seen from the folder of fd. */
static int fails(const char *operation, int fd, const char *path) {
    if (!rules || !rules[0].operation[0])
        return 0;
    char link[64], whole[PATH_MAX] = "";
    size_t length = 0;
    if (!path || path[0] != '/') {
        if (fd == AT_FDCWD)
            length = getcwd(whole, sizeof whole - 1) ? strlen(whole) : 0;
        else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
            ssize_t read_length = readlink(link, whole, sizeof whole - 1);
            length = read_length > 0 ? read_length : 0;
        }
        whole[length] = 0;
        if (path && path[0])
            whole[length++] = '/';
    }
    if (path)
        snprintf(whole + length, sizeof whole - length, "%s", path);
    const char *rank = getenv("RANK");
    for (struct rule *rule = rules; rule < rules + RULES && rule->operation[0]; rule++) {
        if (strcmp(rule->operation, operation) || (rule->rank >= 0 && rule->rank != (rank ? atoi(rank) : 0)) ||
            fnmatch(rule->pattern, whole, 0))
            continue;
        if (rule->skip > 0 && __sync_fetch_and_sub(&rule->skip, 1) > 0)
            continue;
        if (rule->times == 0 || (rule->times > 0 && __sync_fetch_and_sub(&rule->times, 1) <= 0))
            continue;
        for (int second = 0; second < rule->seconds; second++) /* healing clears the rule */
            sleep(1);
        errno = rule->error;
        return rule->error != 0;
    }
    return 0;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static time_t clock_offset(void) {
    time_t offset = 0;
    for (struct rule *rule = rules; rule && rule < rules + RULES && rule->operation[0]; rule++)
        offset += strcmp(rule->operation, "clock") ? 0 : rule->seconds;
    return offset;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static __typeof__(&clock_gettime) next;
    if (!next)
        next = NEXT(clock_gettime);
    int failed = next(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += clock_offset();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int failed = NEXT(gettimeofday)(now, zone);
    if (!failed)
        now->tv_sec += clock_offset();
    return failed;
}

time_t time(time_t *to) {
    time_t now = NEXT(time)(NULL) + clock_offset();
    if (to)
        *to = now;
    return now;
}

#define WRAPPED(type, failure, name, parameters, arguments, operation, fd, path)                                       \
    type name parameters {                                                                                             \
        return fails(operation, fd, path) ? (failure) : NEXT(name) arguments;                                          \
    }
#define WRAPPED_OPEN(name, parameters, arguments, fd, path)                                                            \
    int name parameters {                                                                                              \
        mode_t mode = 0;                                                                                               \
        if (flags & (O_CREAT | O_TMPFILE)) {                                                                           \
            va_list rest;                                                                                              \
            va_start(rest, flags);                                                                                     \
            mode = va_arg(rest, mode_t);                                                                               \
            va_end(rest);                                                                                              \
        }                                                                                                              \
        return fails(flags & (O_WRONLY | O_RDWR) ? "create" : "open", fd, path) ? -1 : NEXT(name) arguments;           \
    }

WRAPPED_OPEN(open, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD, path)
WRAPPED_OPEN(open64, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD, path)
WRAPPED_OPEN(openat, (int fd, const char *path, int flags, ...), (fd, path, flags, mode), fd, path)
WRAPPED_OPEN(openat64, (int fd, const char *path, int flags, ...), (fd, path, flags, mode), fd, path)
#define WRAPPED_READ(name, parameters, arguments)                                                                      \
    ssize_t name parameters {                                                                                          \
        if (fails("read", fd, NULL))                                                                                   \
            return -1;                                                                                                 \
        ssize_t size_read = NEXT(name) arguments;                                                                      \
        if (size_read > 0 && fails("flip", fd, NULL))                                                                  \
            ((char *)to)[size_read / 2] ^= 1;                                                                          \
        return size_read;                                                                                              \
    }

WRAPPED_READ(read, (int fd, void *to, size_t size), (fd, to, size))
WRAPPED_READ(pread64, (int fd, void *to, size_t size, off64_t at), (fd, to, size, at))
WRAPPED(ssize_t, -1, write, (int fd, const void *from, size_t size), (fd, from, size), "write", fd, NULL)
WRAPPED(int, -1, fsync, (int fd), (fd), "fsync", fd, NULL)
WRAPPED(int, -1, stat, (const char *path, struct stat *to), (path, to), "stat", AT_FDCWD, path)
WRAPPED(int, -1, stat64, (const char *path, struct stat64 *to), (path, to), "stat", AT_FDCWD, path)
WRAPPED(int, -1, fstatat, (int fd, const char *path, struct stat *to, int flags), (fd, path, to, flags), "stat", fd, path)
WRAPPED(int, -1, fstatat64, (int fd, const char *path, struct stat64 *to, int flags), (fd, path, to, flags), "stat", fd, path)
WRAPPED(int, -1, rename, (const char *from, const char *to), (from, to), "rename", AT_FDCWD, to)
WRAPPED(int, -1, unlink, (const char *path), (path), "remove", AT_FDCWD, path)
WRAPPED(int, -1, unlinkat, (int fd, const char *path, int flags), (fd, path, flags), "remove", fd, path)
WRAPPED(int, -1, rmdir, (const char *path), (path), "remove", AT_FDCWD, path)
WRAPPED(int, -1, mkdir, (const char *path, mode_t mode), (path, mode), "mkdir", AT_FDCWD, path)
WRAPPED(DIR *, NULL, opendir, (const char *path), (path), "list", AT_FDCWD, path)
