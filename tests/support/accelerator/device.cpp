// Memory, streams, events and the few kernels that are not left to the fallback in Python.
#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <unordered_map>

namespace standin {
namespace {

std::mutex timeline_mutex;
std::vector<Entry> told;
std::map<int64_t, Tasks> pending; // by stream: what it has to come to the end of
std::atomic<int64_t> streams{1}, events{1};
thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<int64_t, kDevices> current_streams{};

c10::Stream stream_of(c10::DeviceIndex device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), id);
}

void await(const Tasks& tasks) {
  for (auto& task : tasks) {
    task->wait();
  }
}

bool all_done(const Tasks& tasks) {
  for (auto& task : tasks) {
    if (!task->done()) {
      return false;
    }
  }
  return true;
}

struct Event {
  int64_t id = events++;
  Tasks tasks;
  std::chrono::steady_clock::time_point at;
};

// --- memory: the same pages twice, once where nobody may touch them ------------------------------

constexpr size_t kArena = size_t(1) << 36; // of addresses; pages exist once they are written to
struct Arena {
  char *device, *host;
  std::atomic<size_t> used{0};

  Arena() {
    int file = memfd_create("standin", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, kArena) == 0, "no memory for the stand-in device");
    void* unreadable = mmap(nullptr, kArena, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
    void* readable = mmap(nullptr, kArena, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(unreadable != MAP_FAILED && readable != MAP_FAILED, "no memory for the stand-in device");
    device = static_cast<char*>(unreadable);
    host = static_cast<char*>(readable);
    close(file);
  }
};
Arena& arena() {
  static Arena* one = new Arena;
  return *one;
}

void release(void* address) {
  tell({{kFree, reinterpret_cast<int64_t>(address), 0, 0}});
}

// Addresses are never used twice: what is freed too early is found by the order of events, not by luck.
struct Allocator final : at::Allocator {
  at::DataPtr allocate(size_t nbytes) override {
    auto device = c10::Device(kType, current_device);
    if (nbytes == 0) {
      return {nullptr, nullptr, &release, device};
    }
    size_t at = arena().used.fetch_add((nbytes + 511) / 512 * 512);
    TORCH_CHECK(at + nbytes <= kArena, "the stand-in device is out of memory");
    void* address = arena().device + at;
    auto stream = current_stream(current_device);
    tell({{kAllocate, reinterpret_cast<int64_t>(address), int64_t(nbytes), key(stream)}});
    return {address, address, &release, device};
  }
  at::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    auto shift = arena().host - arena().device;
    std::memcpy(static_cast<char*>(to) + shift, static_cast<const char*>(from) + shift, count);
  }
};
Allocator allocator;

// --- devices, streams, events ---------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return {kType, current_device};
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "there is no device ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) {
      current_device = device.index();
    }
  }
  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device.has_index() ? device.index() : current_device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(device.has_index() ? device.index() : current_device, 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return new_stream(device.has_index() ? device.index() : current_device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return new_stream(device.has_index() ? device.index() : current_device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = current_stream(stream.device_index());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Event;
    }
    auto* made = static_cast<Event*>(*event);
    std::lock_guard<std::mutex> guard(timeline_mutex);
    made->tasks = pending[key(stream)];
    made->at = std::chrono::steady_clock::now();
    told.push_back({kRecord, made->id, key(stream), 0});
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) {
      return; // never recorded
    }
    auto* made = static_cast<Event*>(event);
    std::lock_guard<std::mutex> guard(timeline_mutex);
    auto& waits = pending[key(stream)];
    waits.insert(waits.end(), made->tasks.begin(), made->tasks.end());
    told.push_back({kWait, made->id, key(stream), 0});
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || all_done(static_cast<Event*>(event)->tasks);
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      auto* made = static_cast<Event*>(event);
      await(made->tasks);
      tell({{kSyncEvent, made->id, 0, 0}});
    }
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    std::chrono::duration<double, std::milli> between = static_cast<Event*>(to)->at - static_cast<Event*>(from)->at;
    return between.count();
  }
  bool queryStream(const c10::Stream& stream) const override {
    std::unique_lock<std::mutex> guard(timeline_mutex);
    auto tasks = pending[key(stream)];
    guard.unlock();
    return all_done(tasks);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    await_stream(stream);
    tell({{kSyncStream, key(stream), 0, 0}});
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    std::unique_lock<std::mutex> guard(timeline_mutex);
    Tasks all;
    for (auto& [stream, tasks] : pending) {
      if (stream >> 32 == device) {
        all.insert(all.end(), tasks.begin(), tasks.end());
      }
    }
    guard.unlock();
    await(all);
    tell({{kSyncDevice, device, 0, 0}});
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (data.get() != nullptr) {
      tell({{kUse, reinterpret_cast<int64_t>(data.get()), key(stream), 0}});
    }
  }
};

// Pinned memory: the host's, of which it is known that the device may copy it while the host goes on.
std::mutex pinned_mutex;
std::map<const char*, size_t> pinned;

void release_pinned(void* address) {
  {
    std::lock_guard<std::mutex> guard(pinned_mutex);
    pinned.erase(static_cast<const char*>(address));
  }
  free(address);
}

struct PinnedAllocator final : at::Allocator {
  at::DataPtr allocate(size_t nbytes) override {
    void* address = aligned_alloc(64, (nbytes + 64) / 64 * 64);
    std::lock_guard<std::mutex> guard(pinned_mutex);
    pinned[static_cast<const char*>(address)] = nbytes;
    return {address, address, &release_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  at::DeleterFnPtr raw_deleter() const override {
    return &release_pinned;
  }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    std::memcpy(to, from, count);
  }
};
PinnedAllocator pinned_allocator;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return kDevices;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device;
  }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> guard(pinned_mutex);
    auto after = pinned.upper_bound(static_cast<const char*>(data));
    return after != pinned.begin() && data < std::prev(after)->first + std::max<size_t>(std::prev(after)->second, 1);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator;
  }
  c10::Device getDeviceFromPtr(void*) const override {
    return {kType, current_device};
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::DeviceGuard guard(storage.device());
    auto* held = storage.unsafeGetStorageImpl();
    auto bigger = allocator.allocate(size);
    if (held->nbytes() && size) {
      allocator.copy_data(bigger.get(), held->data(), std::min(size, held->nbytes()));
    }
    held->set_data_ptr(std::move(bigger));
    held->set_nbytes(size);
  }
};

// --- kernels ------------------------------------------------------------------------------------------

c10::Device resolved(std::optional<c10::Device> device) {
  return device && device->has_index() ? *device : c10::Device(kType, current_device);
}

at::Tensor empty(
    c10::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(resolved(device));
  return at::detail::empty_generic(
      size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>) {
  c10::OptionalDeviceGuard guard(resolved(device));
  return at::detail::empty_strided_generic(
      size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self,
      C10_AS_INTARRAYREF_SLOW(size),
      C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const int64_t length = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(c10::IntArrayRef{length}, c10::IntArrayRef{1}, 0);
  return self;
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source.storage());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}

at::Tensor& set_nothing(at::Tensor& self) {
  auto nothing = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), 0, allocator.allocate(0), &allocator, true);
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(at::Storage(nothing));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(c10::IntArrayRef{0}, c10::IntArrayRef{1}, 0);
  return self;
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  size_t needed = (self.storage_offset() + self.numel()) * self.dtype().itemsize();
  if (self.storage().nbytes() < needed) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  }
  if (format && *format != at::MemoryFormat::Preserve) {
    impl->empty_tensor_restride(*format);
  }
  return self;
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("resize_", &resize);
  m.impl("record_stream", &record_stream);
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

[[maybe_unused]] const bool registered = [] {
  c10::SetAllocator(kType, &allocator);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

} // namespace

void Task::finish() {
  std::lock_guard<std::mutex> guard(mutex_);
  done_ = true;
  changed_.notify_all();
}

void Task::wait() {
  std::unique_lock<std::mutex> guard(mutex_);
  changed_.wait(guard, [this] { return done_; });
}

bool Task::done() {
  std::lock_guard<std::mutex> guard(mutex_);
  return done_;
}

void tell(std::initializer_list<Entry> entries) {
  std::lock_guard<std::mutex> guard(timeline_mutex);
  told.insert(told.end(), entries);
}

std::vector<Entry> take_told() {
  std::lock_guard<std::mutex> guard(timeline_mutex);
  return std::exchange(told, {});
}

int64_t key(c10::Stream stream) {
  return int64_t(stream.device_index()) << 32 | stream.id();
}

c10::Stream current_stream(c10::DeviceIndex device) {
  return stream_of(device, current_streams.at(device));
}

c10::Stream new_stream(c10::DeviceIndex device) {
  return stream_of(device, streams++);
}

void queue(const std::shared_ptr<Task>& task, c10::Stream stream, std::vector<Entry> ranges) {
  std::lock_guard<std::mutex> guard(timeline_mutex);
  told.push_back({kCollective, key(stream), int64_t(ranges.size()), 0});
  told.insert(told.end(), ranges.begin(), ranges.end());
  task->after = std::exchange(pending[key(stream)], {task});
}

void await_stream(c10::Stream stream) {
  std::unique_lock<std::mutex> guard(timeline_mutex);
  auto tasks = pending[key(stream)];
  guard.unlock();
  await(tasks);
  guard.lock();
  auto& waits = pending[key(stream)];
  waits.erase(
      std::remove_if(waits.begin(), waits.end(), [](const auto& task) { return task->done(); }), waits.end());
}

at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.numel() == 0 || tensor.device().type() != kType) {
    return tensor.device().type() == kType ? at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU)) : tensor;
  }
  auto* address = static_cast<char*>(tensor.unsafeGetTensorImpl()->mutable_data()) - arena().device + arena().host;
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  return at::from_blob(address, tensor.sizes(), tensor.strides(), options);
}

} // namespace standin
