// A stand-in for an accelerator: what its parts have in common. See __init__.py.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

namespace standin {

constexpr int kDevices = 4;
constexpr auto kType = c10::DeviceType::PrivateUse1;

// Something that a stream has to come to the end of before what is queued behind it: a collective.
// (Kernels run when they are launched, after whatever their stream waits for.)
struct Task {
  void finish();
  void wait();
  bool done();

  std::vector<std::shared_ptr<Task>> after;
  std::exception_ptr error; // set before it is done

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
};
using Tasks = std::vector<std::shared_ptr<Task>>;

// What is told to the reader in Python, in the order in which it happened.
enum Kind : int64_t {
  kAllocate,   // address, bytes, stream
  kFree,       // address
  kUse,        // address, stream: the allocator knows of it (record_stream)
  kRecord,     // event, stream
  kWait,       // event, stream
  kSyncEvent,  // event
  kSyncStream, // stream
  kSyncDevice, // device
  kCollective, // stream, ranges that follow
  kRange,      // begin, end, written
};
struct Entry {
  int64_t kind, a, b, c;
};
void tell(std::initializer_list<Entry> entries);
void tell(const std::vector<Entry>& entries);
std::vector<Entry> take_told();

int64_t key(c10::Stream stream);
c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream new_stream(c10::DeviceIndex device);
// Queues a task on a stream; it runs after what the stream waits for.
void queue(const std::shared_ptr<Task>& task, c10::Stream stream, std::vector<Entry> ranges);
// Returns when a stream has come to its end.
void await_stream(c10::Stream stream);

// The same memory where the host may touch it: where the device's own is, it may not.
at::Tensor on_host(const at::Tensor& tensor);

} // namespace standin
