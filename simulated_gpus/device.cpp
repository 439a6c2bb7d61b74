// SPDX-License-Identifier: Apache-2.0
// A CUDA device without a GPU, for the CPU build of torch. Its tensors have CUDA's device, dispatch key and checks;
// their bytes lie in host memory, and CPU kernels compute on them, so every number is real.
//
//   tensor on cuda:0 --> fallback: refuse what CUDA refuses --> alias on the same bytes --> CPU kernel --> cuda:0
//
// Here: the allocator, which counts as CUDA's does; devices, streams and events; hooks; the fallback. Everything is done
// when a call returns, so a wait costs nothing here; what would wait on a GPU is counted, and what would have to wait and
// does not is found (races.cpp).
//
// To be loaded before `import torch`, with RTLD_GLOBAL: torch looks hooks up once, and getAccelerator is replaced.

#include "device.h"
#include "pinned.h"
#include "races.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/record_function.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/strides.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace simulated {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;

static int num_devices() {
  const char* text = std::getenv("SIMULATED_GPUS");
  return text ? std::atoi(text) : 0;
}

static thread_local DeviceIndex current_device = 0;  // as in CUDA, a new thread begins at device 0
static thread_local std::map<DeviceIndex, c10::StreamId> current_stream;
static std::atomic<int64_t> num_streams{0};

static int stream_here() { return static_cast<int>(current_stream[current_device]); }

// Memory.

constexpr size_t kBlock = 512;  // c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize
constexpr int kMaxDevices = 64;

struct Counts {
  std::atomic<int64_t> now{0}, peak{0};
};
static Counts counts[kMaxDevices];

constexpr int64_t kUnread = -1;
static std::atomic<int64_t> capacity_bytes{kUnread};
// A forked process may have another limit in its environment.
[[maybe_unused]] static const int at_fork = pthread_atfork(nullptr, nullptr, [] { capacity_bytes = kUnread; });

static int64_t capacity() {
  if (capacity_bytes == kUnread) {
    const char* text = std::getenv("SIMULATED_GPU_MEMORY");
    capacity_bytes = text ? std::atoll(text) : int64_t{80} << 30;
  }
  return capacity_bytes;
}

static int64_t in_blocks(size_t bytes) { return static_cast<int64_t>((bytes + kBlock - 1) / kBlock * kBlock); }

static void take(DeviceIndex device, size_t bytes) {
  auto& count = counts[device];
  int64_t now = count.now.fetch_add(in_blocks(bytes)) + in_blocks(bytes);
  if (now > capacity()) {
    count.now.fetch_sub(in_blocks(bytes));
    TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", bytes, " bytes. GPU ",
                     static_cast<int>(device), " has a total capacity of ", capacity(), " bytes of which ",
                     capacity() - now + in_blocks(bytes), " are free (simulated).");
  }
  int64_t peak = count.peak.load();
  while (now > peak && !count.peak.compare_exchange_weak(peak, now)) {
  }
}

// Host memory that counts as a device's while it lives.
struct Block {
  c10::DataPtr host;
  DeviceIndex device;
  size_t bytes;
  History* history;
};

static void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  counts[block->device].now.fetch_sub(in_blocks(block->bytes));
  freed(block->history);
  delete block;
}

static c10::DataPtr on_device(c10::DataPtr host, size_t bytes, DeviceIndex device) {
  take(device, bytes);
  void* data = host.get();
  return {data, new Block{std::move(host), device, bytes, allocated(stream_here())}, &free_block, Device(DeviceType::CUDA, device)};
}

static History* history_of(const c10::DataPtr& data) {
  return data.get_deleter() == &free_block ? static_cast<Block*>(data.get_context())->history : nullptr;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    return on_device(c10::GetCPUAllocator()->allocate(bytes), bytes, current_device);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
static DeviceAllocator device_allocator;

static void free_pinned(void* context) {
  auto* host = static_cast<c10::DataPtr*>(context);
  unpin(host->get());
  delete host;
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* host = new c10::DataPtr(c10::GetCPUAllocator()->allocate(bytes));
    pin(host->get(), bytes);
    return {host->get(), host, &free_pinned, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
static PinnedAllocator pinned_allocator;

// Devices, streams, events.

static void check_device(DeviceIndex index) {
  TORCH_CHECK(index < num_devices(), "CUDA error: invalid device ordinal: ", static_cast<int>(index), " of ",
              num_devices(), " (simulated)");
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  struct Recorded {
    std::chrono::steady_clock::time_point time;
    Event* event = nullptr;
    ~Recorded() { forget(event); }
  };

  DeviceType type() const override { return DeviceType::CUDA; }
  Device getDevice() const override { return Device(DeviceType::CUDA, current_device); }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(num_devices()); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  void setDevice(Device device) const override {
    check_device(device.index());
    uncheckedSetDevice(device);
  }
  Device exchangeDevice(Device device) const override {
    Device old = getDevice();
    setDevice(device);
    return old;
  }
  c10::Stream stream_of(Device device, c10::StreamId id) const {
    return c10::Stream(c10::Stream::UNSAFE, Device(DeviceType::CUDA, index_of(device)), id);
  }
  c10::Stream getStream(Device device) const override { return stream_of(device, current_stream[index_of(device)]); }
  c10::Stream getDefaultStream(Device device) const override { return stream_of(device, 0); }
  c10::Stream getNewStream(Device device, int) const override { return stream_of(device, 1 + num_streams++ % (kStreams - 1)); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto old = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return old;
  }
  static Recorded* recorded_of(void* event) { return static_cast<Recorded*>(event); }
  static const Event* event_of(void* event) { return event ? recorded_of(event)->event : nullptr; }
  static int index_of(const c10::Stream& stream) { return static_cast<int>(stream.id()); }
  void record(void** event, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Recorded();
    recorded_of(*event)->time = std::chrono::steady_clock::now();
    recorded_of(*event)->event = simulated::record(recorded_of(*event)->event, index_of(stream));
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete recorded_of(event); }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(recorded_of(to)->time - recorded_of(from)->time).count();
  }
  void block(void* event, const c10::Stream& stream) const override { wait_for(event_of(event), index_of(stream)); }
  bool queryEvent(void* event) const override {
    host_waits_for(event_of(event));  // it is told that all is done
    return true;
  }
  bool queryStream(const c10::Stream& stream) const override {
    host_waits_for_stream(index_of(stream));
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override { host_waits_for_stream(index_of(stream)); }
  void synchronizeEvent(void* event) const override { host_waits_for(event_of(event)); }
  void synchronizeDevice(const DeviceIndex) const override { host_waits_for_all(); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (auto* history = history_of(data)) recorded(history, index_of(stream));
  }

  static DeviceIndex index_of(Device device) { return device.index() < 0 ? current_device : device.index(); }
};
static Guard guard;
static c10::impl::DeviceGuardImplRegistrar guard_registrar(DeviceType::CUDA, &guard);

// What is counted.

static std::atomic<OnWait> on_wait{nullptr};
static std::mutex ops_lock;
static std::map<std::string, int64_t> ops;

static void tell_wait(const char* why) {
  if (auto told = on_wait.load()) told(why);
}

void waited(const std::string& why) {
  host_waits_for_stream(stream_here());
  tell_wait(why.c_str());
}

// In bytes of its storage.
static int64_t end_of(const at::Tensor& tensor) {
  int64_t last = tensor.storage_offset();
  for (int64_t i = 0; i < tensor.dim(); i++) last += (tensor.size(i) - 1) * tensor.stride(i);
  return (last + 1) * static_cast<int64_t>(tensor.itemsize());
}

void used(const at::Tensor& tensor, bool is_write, const std::string& by) {
  if (!tensor.defined() || !tensor.is_cuda() || !tensor.has_storage() || tensor.numel() == 0) return;
  auto* history = history_of(tensor.storage().data_ptr());
  if (!history) return;
  used(history, tensor.storage_offset() * tensor.itemsize(), end_of(tensor), stream_here(), is_write, by);
}

std::pair<int64_t, int64_t> progress() { return progress(stream_here()); }

void called(const std::string& name) {
  std::lock_guard<std::mutex> guard(ops_lock);
  ops[name]++;
}

// Aliases: CPU tensors on the bytes of tensors of the device, for one operation.

static c10::Storage same_bytes(const c10::Storage& storage, Device device, size_t bytes, c10::Allocator* allocator) {
  auto* keeper = new c10::Storage(storage);
  c10::DataPtr data(const_cast<void*>(storage.data()), keeper,
                    [](void* kept) { delete static_cast<c10::Storage*>(kept); }, Device(DeviceType::CPU));
  if (device.is_cuda()) data = on_device(std::move(data), bytes, device.index());
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, std::move(data), allocator,
                                               true);
}

static at::Tensor view_of(const at::Tensor& tensor, c10::Storage storage, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), tensor.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) impl->_set_conj(true);
  if (tensor.is_neg()) impl->_set_neg(true);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

struct Aliases {
  std::unordered_map<c10::StorageImpl*, c10::Storage> alias_of, origin_of;  // storages, there and back
  std::unordered_map<c10::TensorImpl*, at::Tensor> tensor_of;               // alias -> tensor of the device
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;                     // tensor of the device, alias
  std::vector<bool> is_written;                                             // by pair
  bool writes_next = false;                                                 // what comes to the host from now on
  std::vector<at::Tensor> of_host;                                          // arguments that lie on the host
  std::optional<Device> device;

  at::Tensor to_host(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      of_host.push_back(tensor);
      return tensor;
    }
    if (!device) device = tensor.device();
    TORCH_CHECK(*device == tensor.device(),
                "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ",
                tensor.device(), "! (simulated)");
    auto* origin = tensor.storage().unsafeGetStorageImpl();
    auto known = alias_of.find(origin);
    if (known == alias_of.end()) {
      auto alias = same_bytes(tensor.storage(), Device(DeviceType::CPU), origin->nbytes(), c10::GetCPUAllocator());
      origin_of.emplace(alias.unsafeGetStorageImpl(), tensor.storage());
      known = alias_of.emplace(origin, std::move(alias)).first;
    }
    auto alias = view_of(tensor, known->second, c10::DispatchKey::CPU);
    tensor_of.emplace(alias.unsafeGetTensorImpl(), tensor);
    pairs.emplace_back(tensor, alias);
    is_written.push_back(writes_next);
    return alias;
  }

  at::Tensor to_device(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.device().is_cpu() || !tensor.has_storage()) return tensor;
    auto same = tensor_of.find(tensor.unsafeGetTensorImpl());
    if (same != tensor_of.end()) return same->second;
    auto* found = tensor.storage().unsafeGetStorageImpl();
    auto known = origin_of.find(found);
    if (known == origin_of.end()) {
      known = origin_of.emplace(found, same_bytes(tensor.storage(), *device, found->nbytes(), &device_allocator)).first;
    }
    return view_of(tensor, known->second, c10::DispatchKey::CUDA);
  }

  // An operation may have resized what it was given (out=...): the tensors of the device follow.
  void follow_resizes() {
    for (auto& [tensor, alias] : pairs) {
      auto* mine = tensor.storage().unsafeGetStorageImpl();
      const auto& now = alias.storage();
      if (mine->data() != now.data()) {
        auto* keeper = new c10::Storage(now);
        c10::DataPtr data(const_cast<void*>(now.data()), keeper,
                          [](void* kept) { delete static_cast<c10::Storage*>(kept); }, Device(DeviceType::CPU));
        mine->set_data_ptr_noswap(on_device(std::move(data), now.nbytes(), tensor.device().index()));
      }
      if (mine->nbytes() != now.nbytes()) mine->set_nbytes(now.nbytes());
      if (alias.sizes() != tensor.sizes() || alias.strides() != tensor.strides()) {
        tensor.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
      }
    }
  }
};

static Range range_of(const at::Tensor& tensor) {
  const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  return {begin, begin + static_cast<uintptr_t>(end_of(tensor) - tensor.storage_offset() * tensor.itemsize())};
}

// The fallback.

using Names = std::unordered_set<std::string>;

// Operations that take tensors of the host beside those of the device: indices are copied there.
static const Names kTakesHostTensors = {"aten::index.Tensor",     "aten::index.Tensor_out", "aten::_index_put_impl_",
                                        "aten::index_put_",       "aten::_unsafe_index.Tensor",
                                        "aten::set_.source_Tensor"};

// Operations whose result has a size or a value that the host needs to go on.
static const Names kWaits = {"aten::nonzero",      "aten::nonzero.out",         "aten::masked_select",
                             "aten::_unique2",     "aten::masked_select.out",   "aten::unique_dim",
                             "aten::equal",        "aten::unique_consecutive",  "aten::repeat_interleave.Tensor",
                             "aten::bincount",     "aten::_local_scalar_dense"};

// Operations that look at shapes and flags alone.
static const Names kReadsNoBytes = {"aten::set_.source_Tensor",  "aten::is_same_size", "aten::empty_like",
                                    "aten::set_.source_Storage", "aten::is_set_to",    "aten::resize_",
                                    "aten::set_.source_Storage_storage_offset"};

// Products, which CUDA has for floating point only.
static const Names kProducts = {"aten::mm",  "aten::mm.out",  "aten::addmm",   "aten::addmm.out",
                                "aten::bmm", "aten::bmm.out", "aten::baddbmm", "aten::baddbmm.out"};

// What CUDA's kernels refuse and CPU kernels take.
static void refuse(const std::string& name, const Aliases& aliases) {
  if (name.rfind("aten::_fused_adam", 0) == 0 || name.rfind("aten::_fused_sgd", 0) == 0) {
    TORCH_CHECK(aliases.of_host.empty(), name, ": a tensor of the host, where CUDA's fused kernel wants all on ",
                *aliases.device, " (simulated)");
  } else if (!kTakesHostTensors.count(name)) {
    for (const auto& tensor : aliases.of_host) {
      TORCH_CHECK(tensor.dim() == 0, "Expected all tensors to be on the same device, but found at least two devices, ",
                  *aliases.device, " and cpu! (", name, ", a host tensor of shape ", tensor.sizes(), "; simulated)");
    }
  }
  if (kProducts.count(name)) {
    for (const auto& [tensor, alias] : aliases.pairs) {
      TORCH_CHECK(at::isFloatingType(tensor.scalar_type()) || at::isComplexType(tensor.scalar_type()), "\"", name,
                  "\" not implemented for '", tensor.scalar_type(), "' (simulated)");
    }
  }
}

static void count_waits(const std::string& name, const Aliases& aliases) {
  if (kWaits.count(name)) {
    waited(name);
  } else if (name == "aten::index.Tensor" || name == "aten::_index_put_impl_") {
    for (const auto& [tensor, alias] : aliases.pairs) {
      if (tensor.scalar_type() == at::kBool && tensor.dim() > 0) return waited(name + " with a mask");
    }
    for (const auto& tensor : aliases.of_host) {
      if (!is_pinned(tensor.storage().data())) return waited(name + " with indices in pageable host memory");
    }
  }
}

static c10::IValue to_host(const c10::IValue& value, Aliases& aliases) {
  if (value.isTensor()) return aliases.to_host(value.toTensor());
  if (value.isTensorList()) {
    std::vector<at::Tensor> found;
    for (const at::Tensor& tensor : value.toTensorVector()) found.push_back(aliases.to_host(tensor));
    return found;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> found;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      found.push_back(tensor && tensor->defined() ? std::optional<at::Tensor>(aliases.to_host(*tensor)) : tensor);
    }
    return found;
  }
  if (value.isDevice() && value.toDevice().is_cuda()) {
    if (!aliases.device) aliases.device = Device(DeviceType::CUDA, Guard::index_of(value.toDevice()));
    return Device(DeviceType::CPU);
  }
  if (value.isGenerator()) return at::detail::getDefaultCPUGenerator();
  return value;
}

static c10::IValue to_device(const c10::IValue& value, Aliases& aliases) {
  if (value.isTensor()) return aliases.to_device(value.toTensor());
  if (value.isTensorList()) {
    std::vector<at::Tensor> found;
    for (const at::Tensor& tensor : value.toTensorVector()) found.push_back(aliases.to_device(tensor));
    return found;
  }
  return value;
}

static bool is_half(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() && at::isReducedFloatingType(value.toTensor().scalar_type());
}

// As tensor cores do: factors of 16 bits, sums in float32, rounded once. Without AVX-512 a CPU kernel for 16 bits takes
// up to 50 times as long as one for float32.
static void product_in_float32(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  std::optional<at::ScalarType> half;
  std::optional<at::Tensor> out;
  for (size_t i = 0; i < arguments.size(); i++) {
    auto& value = (*stack)[first + i];
    if (!is_half(value)) continue;
    const at::Tensor tensor = value.toTensor();
    half = tensor.scalar_type();
    if (!arguments[i].is_out()) {
      value = tensor.to(at::kFloat);
    } else {
      out = tensor;
      value = at::empty({0}, tensor.options().dtype(at::kFloat));
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  if (!half) return;
  auto& result = stack->back();
  result = out ? out->resize_(result.toTensor().sizes()).copy_(result.toTensor()) : result.toTensor().to(*half);
}

static bool is_view(const c10::FunctionSchema& schema) {
  const auto& results = schema.returns();
  return std::any_of(results.begin(), results.end(),
                     [](const auto& one) { return one.alias_info() && !one.alias_info()->isWrite(); });
}

static void note_accesses(const c10::FunctionSchema& schema, const std::string& name, const Aliases& aliases,
                          const torch::jit::Stack& stack) {
  if (is_view(schema) || kReadsNoBytes.count(name)) return;
  for (size_t i = 0; i < aliases.pairs.size(); i++) used(aliases.pairs[i].first, aliases.is_written[i], name);
  for (size_t i = stack.size() - schema.returns().size(); i < stack.size(); i++) {
    if (schema.returns()[i + schema.returns().size() - stack.size()].alias_info()) continue;
    if (stack[i].isTensor()) used(stack[i].toTensor(), true, name);
    if (!stack[i].isTensorList()) continue;
    for (const at::Tensor& tensor : stack[i].toTensorVector()) used(tensor, true, name);
  }
}

static void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  std::string name = schema.operator_name().name;
  if (!schema.operator_name().overload_name.empty()) name += "." + schema.operator_name().overload_name;
  Aliases aliases;
  const size_t first = stack->size() - schema.arguments().size();
  for (size_t i = first; i < stack->size(); i++) {
    const auto* alias = schema.arguments()[i - first].alias_info();
    aliases.writes_next = alias && alias->isWrite();
    (*stack)[i] = to_host((*stack)[i], aliases);
  }
  if (!aliases.device) aliases.device = Device(DeviceType::CUDA, current_device);
  refuse(name, aliases);
  called(name);
  for (const auto& tensor : aliases.of_host) {
    // The host gives the value of a tensor without dimensions to a kernel when it begins it.
    tensor.dim() ? before_use(range_of(tensor)) : host_used(range_of(tensor), false, name);
  }
  {
    at::RecordFunctionGuard not_the_host(false);
    if (kProducts.count(name)) {
      product_in_float32(op, stack);
    } else {
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    }
  }
  aliases.follow_resizes();
  for (const auto& tensor : aliases.of_host) {
    if (tensor.dim()) after_use(range_of(tensor), stream_here(), false, false, name);
  }
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) {
    (*stack)[i] = to_device((*stack)[i], aliases);
  }
  note_accesses(schema, name, aliases, *stack);
  count_waits(name, aliases);
}

// Rows from which a product with a weight of 4 bits makes the weight whole first; up to this a fused kernel does without
// on an H100, for weights of usual size (bitsandbytes 0.50.2, backends/cuda/ops.py, _gemm_4bit_use_custom_cuda).
constexpr int64_t kFusedRows = 64;

// As _dequant_linear_fallback there: the scales in float32, before and after they are shifted, and the weight.
static void product_in_4_bits(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const size_t first = stack->size() - op.schema().arguments().size();
  const auto hidden = (*stack)[first].toTensor();
  const auto shape = (*stack)[first + 2].toIntVector();
  const int64_t numel = c10::multiply_integers(shape), blocks = numel / (*stack)[first + 4].toInt();
  std::vector<at::Tensor> held;
  if (hidden.numel() > kFusedRows * hidden.size(-1)) {
    const auto single = hidden.options().dtype(at::kFloat);
    held = {at::empty({blocks}, single), at::empty({blocks}, single), at::empty({numel}, hidden.options())};
  }
  fallback(op, keys, stack);
}

// CUDA's kernel counts integers as well, such as the tokens of experts, the CPU's floats only.
static void histc(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const size_t first = stack->size() - op.schema().arguments().size();
  const auto type = (*stack)[first].toTensor().scalar_type();
  const bool counts_integers = c10::isIntegralType(type, /*includeBool=*/false);
  if (counts_integers) (*stack)[first] = (*stack)[first].toTensor().to(at::kFloat);
  fallback(op, keys, stack);
  if (counts_integers) stack->back() = stack->back().toTensor().to(type);
}

// CUDA's kernels read fp16 and write float32, and back; the CPU's have one dtype.
static void softmax(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const size_t first = stack->size() - op.schema().arguments().size();
  if ((*stack)[first + 2].toBool()) {
    (*stack)[first] = (*stack)[first].toTensor().to(at::kFloat);
    (*stack)[first + 2] = false;
  }
  fallback(op, keys, stack);
}

static void softmax_backward(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const size_t first = stack->size() - op.schema().arguments().size();
  const auto type = (*stack)[first].toTensor().scalar_type(), asked = (*stack)[first + 3].toScalarType();
  (*stack)[first + 3] = type;
  fallback(op, keys, stack);
  if (asked != type) stack->back() = stack->back().toTensor().to(asked);
}

// CUDA's kernel gives every NaN of 16 bits the same bits, 0x7FFF by bitsandbytes issue 1945: numbers stay, but not bytes
// that only lie in such tensors. With this, 4-bit weights that FSDP2 gathers give the losses that an H100 gave.
static void foreach_copy(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const size_t first = stack->size() - op.schema().arguments().size();
  const auto targets = (*stack)[first].toTensorVector(), sources = (*stack)[first + 1].toTensorVector();
  fallback(op, keys, stack);
  for (size_t i = 0; i < targets.size(); i++) {
    const auto type = targets[i].scalar_type();
    if (sources[i].scalar_type() != type || (type != at::kBFloat16 && type != at::kHalf)) continue;
    if (!targets[i].is_contiguous()) continue;
    const uint16_t infinity = type == at::kHalf ? 0x7C00 : 0x7F80;
    auto* words = static_cast<uint16_t*>(targets[i].mutable_data_ptr());
    for (int64_t k = 0; k < targets[i].numel(); k++) {
      if ((words[k] & 0x7FFF) > infinity) words[k] = 0x7FFF;
    }
  }
}

// Operations that need a kernel of their own.

static at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> type,
                                std::optional<at::Layout>, std::optional<Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  DeviceIndex index = device ? Guard::index_of(*device) : current_device;
  check_device(index);
  auto dtype = c10::scalarTypeToTypeMeta(c10::dtype_or_default(type));
  int64_t last = 0;
  bool is_empty = false;
  for (size_t i = 0; i < sizes.size(); i++) {
    is_empty = is_empty || sizes[i] == 0;
    last += (sizes[i] - 1) * strides[i];
  }
  size_t bytes = is_empty ? 0 : (last + 1) * dtype.itemsize();
  auto data = on_device(c10::GetCPUAllocator()->allocate(bytes), bytes, index);
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                             std::move(data), &device_allocator, true));
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage),
                                                       c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return made;
}

static at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout> layout,
                        std::optional<Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat>) {
  return empty_strided(sizes, c10::contiguous_strides(sizes), type, layout, device, pin);
}

// Whether the GPU may still be at work on the host's tensor when the call returns: it is pinned, and no temporary comes
// between, which lies in pageable memory (aten/src/ATen/native/cuda/Copy.cu).
static bool goes_on(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const auto& of_host = to.is_cuda() ? from : to;
  if (!non_blocking || !is_pinned(of_host.const_data_ptr())) return false;
  const bool is_plain = to.scalar_type() == from.scalar_type() && to.sizes() == from.sizes() &&
                        to.strides() == from.strides() && to.is_non_overlapping_and_dense();
  return is_plain || (of_host.is_contiguous() && of_host.sizes() == to.sizes());
}

static void count_copy(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const bool pinned = is_pinned((to.is_cuda() ? from : to).storage().data());
  const auto why = std::string(to.is_cuda() ? "copy from " : "copy to ") + (pinned ? "pinned" : "pageable") +
                   " host memory" + (non_blocking ? ", non_blocking" : "");
  if (non_blocking && to.is_cuda()) return tell_wait(why.c_str());  // for room in the driver's own memory, perhaps
  waited(why);
}

static const char* kToPinned = "copy to pinned host memory, non_blocking";
static const char* kFromPinned = "copy from pinned host memory, non_blocking";

static at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  if (to.is_meta() || from.is_meta()) return to;
  const at::Tensor of_host = to.is_cuda() ? from : to;
  const bool is_host = !of_host.is_cuda() && of_host.numel() > 0, is_async = is_host && goes_on(to, from, non_blocking);
  if (is_host) before_use(range_of(of_host));
  {
    at::RecordFunctionGuard not_the_host(false);
    Aliases left, right;  // apart, since a copy goes between devices
    left.to_host(to).copy_(right.to_host(from), false);
  }
  used(from, false, "aten::copy_");
  used(to, true, "aten::copy_");
  if (is_host) after_use(range_of(of_host), stream_here(), from.is_cuda(), is_async, "aten::copy_");
  if (is_async) called(from.is_cuda() ? kToPinned : kFromPinned);
  if (!of_host.is_cuda() && !is_async) count_copy(to, from, non_blocking);
  return to;
}

// The host's own operations on pinned memory where the GPU may be at work. Of those that others are made of, and told as
// these, there is no kernel for the CPU, but for `copy_`; `resolve_conj` returns what it is given, and `tolist` reads that.
static bool is_of_host(const c10::OperatorHandle& op, c10::ArrayRef<const c10::IValue> inputs) {
  for (const auto& value : inputs) {
    if (value.isTensor() && value.toTensor().is_cuda()) return false;
  }
  const auto name = c10::toString(op.operator_name());
  if (name == "aten::copy_" || name == "aten::resolve_conj") return true;
  return op.hasKernelForDispatchKey(c10::DispatchKey::CPU) && !is_view(op.schema()) && !kReadsNoBytes.count(name);
}

// Fake tensors, and those that only hold others, have no bytes.
static bool is_where_gpu_works(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().is_cpu() && tensor.has_storage() && tensor.numel() &&
         !tensor.key_set().has(c10::DispatchKey::Python) && is_at_work(range_of(tensor));
}

static std::unique_ptr<at::ObserverContext> on_operation(const at::RecordFunction& called) {
  if (!is_any_at_work()) return nullptr;
  std::vector<std::pair<size_t, at::Tensor>> found;
  for (size_t i = 0; i < called.inputs().size(); i++) {
    const auto& value = called.inputs()[i];
    if (value.isTensor() && is_where_gpu_works(value.toTensor())) found.emplace_back(i, value.toTensor());
    if (!value.isTensorList()) continue;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      if (is_where_gpu_works(tensor)) found.emplace_back(i, tensor);
    }
  }
  if (found.empty() || !called.operator_name()) return nullptr;
  const auto op = c10::Dispatcher::singleton().findOp(*called.operator_name());
  if (!op || !is_of_host(*op, called.inputs())) return nullptr;
  for (const auto& [i, tensor] : found) {
    const auto* alias = op->schema().arguments()[i].alias_info();
    host_used(range_of(tensor), alias && alias->isWrite(), c10::toString(op->operator_name()));
  }
  return nullptr;
}
static const auto callback = at::addGlobalCallback(
    at::RecordFunctionCallback(&on_operation).needsInputs(true).scopes({at::RecordScope::FUNCTION}));

// A storage of the device with other bytes, those that fit kept.
static void replace_storage(c10::StorageImpl* storage, size_t bytes, DeviceIndex device) {
  auto data = on_device(c10::GetCPUAllocator()->allocate(bytes), bytes, device);
  auto kept = std::min(bytes, storage->nbytes());
  if (kept) std::memcpy(data.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

static const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat>) {
  size_t numel = c10::multiply_integers(sizes);
  size_t bytes = numel ? (numel + self.storage_offset()) * self.itemsize() : 0;
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (bytes > storage->nbytes()) replace_storage(storage, bytes, self.device().index());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, c10::contiguous_strides(sizes));
  return self;
}

static at::Tensor& set_part_of_storage(at::Tensor& self, c10::Storage source, int64_t offset, at::IntArrayRef sizes,
                                       at::IntArrayRef strides) {
  TORCH_CHECK(source.device_type() == DeviceType::CUDA, "Attempted to set the storage of a tensor on device \"",
              self.device(), "\" to a storage on different device \"", source.device(), "\" (simulated)");
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  const bool given = strides.size() == sizes.size();
  impl->set_sizes_and_strides(sizes, given ? c10::DimVector(strides) : c10::contiguous_strides(sizes), offset);
  return self;
}
static at::Tensor& set_storage(at::Tensor& self, c10::Storage source) {
  int64_t numel = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_part_of_storage(self, std::move(source), 0, {numel}, {1});
}
static at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_part_of_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
static at::Tensor& set_nothing(at::Tensor& self) {
  return set_tensor(self, empty_strided({0}, {1}, self.scalar_type(), {}, self.device(), {}));
}

static at::Tensor resize_storage(const at::Tensor& tensor, int64_t bytes) {
  replace_storage(tensor.storage().unsafeGetStorageImpl(), static_cast<size_t>(bytes), tensor.device().index());
  return tensor;
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("_foreach_copy_", torch::CppFunction::makeFromBoxedFunction<&foreach_copy>());
  m.impl("histc", torch::CppFunction::makeFromBoxedFunction<&histc>());
  for (const char* name : {"_softmax", "_log_softmax"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&softmax>());
  }
  for (const char* name : {"_softmax_backward_data", "_log_softmax_backward_data"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&softmax_backward>());
  }
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_part_of_storage);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("record_stream", [](at::Tensor& self, c10::Stream stream) {
    guard.recordDataPtrOnStream(self.storage().data_ptr(), stream);
  });
}

// Operations that CUDA has a kernel for, and every other device a composite of others with their temporaries.
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  for (const char* name : {"silu_backward", "mish_backward", "native_layer_norm", "native_group_norm", "addr", "addr.out",
                           "any.dims", "any.dims_out", "all.dims", "all.dims_out", "convolution",
                           "convolution_backward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

// bitsandbytes has kernels for the CPU, and others of Python for every device that has none: those would leave their
// temporaries in the device's memory, where CUDA's kernels have none.
TORCH_LIBRARY_IMPL(bitsandbytes, CUDA, m) {
  for (const char* name : {"quantize_4bit", "dequantize_4bit", "dequantize_4bit.out", "quantize_blockwise",
                           "dequantize_blockwise", "dequantize_blockwise.out", "gemv_4bit", "gemv_4bit.out",
                           "optimizer_update_8bit_blockwise", "optimizer_update_32bit"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
  m.impl("gemm_4bit", torch::CppFunction::makeFromBoxedFunction<&product_in_4_bits>());
}

// Python's UntypedStorage.resize_ knows only devices that torch was built with.
TORCH_LIBRARY(simulated_gpus, m) { m.def("resize_storage(Tensor tensor, int bytes) -> Tensor"); }
TORCH_LIBRARY_IMPL(simulated_gpus, CUDA, m) { m.impl("resize_storage", &resize_storage); }

struct SetAllocator {
  SetAllocator() { c10::SetAllocator(DeviceType::CUDA, &device_allocator); }
};
static SetAllocator set_allocator;

}  // namespace simulated

namespace at {
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return simulated::num_devices() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(simulated::num_devices()); }
  void setCurrentDevice(DeviceIndex index) const override { simulated::guard.setDevice(Device(kCUDA, index)); }
  DeviceIndex getCurrentDevice() const override { return simulated::current_device; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return simulated::guard.exchangeDevice(Device(kCUDA, index)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return index < 0 ? index : exchangeDevice(index);
  }
  bool isPinnedPtr(const void* pointer) const override { return simulated::is_pinned(pointer); }
  Allocator* getPinnedMemoryAllocator() const override { return &simulated::pinned_allocator; }
  Allocator* getCUDADeviceAllocator() const override { return &simulated::device_allocator; }
  Device getDeviceFromPtr(void*) const override { return Device(kCUDA, simulated::current_device); }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  DeviceIndex current_device() const override { return simulated::current_device; }
  int getNumGPUs() const override { return simulated::num_devices(); }
  void deviceSynchronize(DeviceIndex) const override { simulated::host_waits_for_all(); }
  std::string showConfig() const override { return "simulated CUDA\n"; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

// libtorch_cpu's own answers CUDA only where it was built with it. This library is loaded before it, so the loader binds
// every caller to this one.
namespace at::accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) { return c10::DeviceType::CUDA; }
}  // namespace at::accelerator

// DDP's reducer asks for a clock of the device.
namespace c10d {
struct SimulatedTimer final : Timer {
  explicit SimulatedTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto from = getTimestamp(start), to = getTimestamp(end);
    return from && to ? std::optional<int64_t>(*to - *from) : std::nullopt;
  }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, SimulatedTimer)
}  // namespace c10d

// For Python, by ctypes.
extern "C" {
int simulated_get_device() { return simulated::current_device; }
void simulated_set_device(int index) { simulated::current_device = static_cast<c10::DeviceIndex>(index); }
long simulated_allocated(int index) { return simulated::counts[index].now; }
long simulated_peak(int index) { return simulated::counts[index].peak; }
void simulated_reset_peak(int index) { simulated::counts[index].peak = simulated::counts[index].now.load(); }
long simulated_capacity() { return simulated::capacity(); }
void simulated_on_wait(simulated::OnWait told) { simulated::on_wait = told; }
void simulated_waited(const char* why) { simulated::tell_wait(why); }
void simulated_synchronize() { simulated::host_waits_for_all(); }
const char* simulated_ops() {
  static thread_local std::string text;
  std::lock_guard<std::mutex> guard(simulated::ops_lock);
  text.clear();
  for (auto& [name, count] : simulated::ops) text += name + "\t" + std::to_string(count) + "\n";
  return text.c_str();
}
}
