// A CUDA device that does nothing. It registers what autograd needs to run on fake CUDA tensors without a GPU.
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, getDevice()); }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getStream(device); }
  Stream exchangeStream(Stream) const override { return getStream(getDevice()); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
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
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
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

// Called after torch is imported, because a CUDA build of torch registers its own guard.
extern "C" void register_device() {
  static c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, new Guard);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(attention_kernel);
}
