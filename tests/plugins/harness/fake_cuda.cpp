// A CUDA device that does nothing. It registers what autograd needs to run on fake CUDA tensors without a GPU.
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <utility>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

constexpr DeviceIndex DEVICES = 2;

// The state of each thread, as the CUDA runtime keeps it: its device, and its stream on each device (0 is the default).
thread_local DeviceIndex current_device = 0;
thread_local int64_t current_stream[DEVICES] = {};

// Called when autograd records an event on a stream, or makes a stream wait for an event.
using Callback = void (*)(int64_t event, int64_t device, int64_t stream);
std::atomic<Callback> on_record{nullptr}, on_wait{nullptr};
std::atomic<int64_t> events{0};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device getDevice() const override { return Device(DeviceType::CUDA, current_device); }
  void setDevice(Device device) const override { current_device = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = device.index(); }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  Stream getStream(Device device) const override {
    const DeviceIndex index = device.has_index() ? device.index() : current_device;
    return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, index), current_stream[index]);
  }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override {
    const Stream before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = reinterpret_cast<void*>(--events);  // negative: those of Python are positive
    if (Callback callback = on_record) callback(reinterpret_cast<int64_t>(*event), stream.device_index(), stream.id());
  }
  void block(void* event, const Stream& stream) const override {
    if (Callback callback = on_wait) callback(reinterpret_cast<int64_t>(event), stream.device_index(), stream.id());
  }
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  DeviceIndex current_device() const override { return ::current_device; }
  DeviceIndex getCurrentDevice() const override { return ::current_device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(::current_device, device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
};

}  // namespace

namespace at {
// REGISTRY_PREFERRED, because a CUDA build of torch has registered its own hooks.
C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(CUDAHooksRegistry, "CUDAHooks", c10::REGISTRY_PREFERRED, Hooks)
}  // namespace at

bool has_cudnn = false;

// The kernel of scaled_dot_product_attention: -1 none, 0 math, 1 flash, 2 memory-efficient, 3 cuDNN (at::SDPBackend). It
// follows sdp_utils.cpp: an H100 with cuDNN above 9.15 uses cuDNN for 16-bit dtypes, also with a mask, but not in
// deterministic mode. Otherwise flash needs a 16-bit dtype and no mask, and the memory-efficient kernel has no grouped
// heads.
int64_t attention_kernel(const at::Tensor& query, const at::Tensor& key, const at::Tensor&,
                         const std::optional<at::Tensor>& mask, double, bool, std::optional<double>, bool) {
  const bool half = query.scalar_type() == at::kBFloat16 || query.scalar_type() == at::kHalf;
  const auto& context = at::globalContext();
  if (half && has_cudnn && context.userEnabledCuDNNSDP() && !context.deterministicAlgorithms()) return 3;
  if (half && !mask.has_value() && context.userEnabledFlashSDP()) return 1;
  if (query.size(1) == key.size(1) && context.userEnabledMemEfficientSDP()) return 2;
  return context.userEnabledMathSDP() ? 0 : -1;
}

extern "C" void set_cudnn(bool present) { has_cudnn = present; }
extern "C" int get_device() { return current_device; }
extern "C" void set_device(int device) { current_device = static_cast<DeviceIndex>(device); }
extern "C" int64_t get_stream(int device) { return current_stream[device]; }
extern "C" void set_stream(int device, int64_t stream) { current_stream[device] = stream; }
extern "C" void set_callbacks(Callback record, Callback wait) {
  on_record = record;
  on_wait = wait;
}

// Called after torch is imported, because a CUDA build of torch registers its own guard.
extern "C" void register_device() {
  static c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, new Guard);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(attention_kernel);
}
