// A c10d backend with NCCL's meaning: collectives are queued on a stream, and carried out by gloo.
#include "device.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <pybind11/stl.h>

#include <atomic>
#include <deque>
#include <exception>
#include <functional>
#include <thread>

namespace py = pybind11;
using c10d::Backend, c10d::Work, c10d::OpType;
using Tensors = std::vector<at::Tensor>;

namespace standin {
namespace {

Tensors all_on_host(const Tensors& tensors) {
  Tensors found;
  for (auto& tensor : tensors) {
    found.push_back(on_host(tensor));
  }
  return found;
}

void add_ranges(std::vector<Entry>& ranges, const Tensors& tensors, bool written) {
  for (auto& tensor : tensors) {
    if (tensor.numel()) {
      int64_t begin = reinterpret_cast<int64_t>(tensor.const_data_ptr());
      ranges.push_back({kRange, begin, begin + int64_t(tensor.nbytes()), written});
    }
  }
}

// What a collective needs until its caller's stream is behind it; nothing else may hold that memory.
struct Shelf {
  std::mutex mutex;
  Tensors kept;

  void clear() {
    Tensors released;
    std::lock_guard<std::mutex> guard(mutex);
    released.swap(kept);
  }
  // The collective is known to be over: memory that is let go here is let go behind it.
  void clear_when_over(c10::Stream stream) {
    c10::impl::VirtualGuardImpl impl(kType);
    std::lock_guard<std::mutex> guard(mutex);
    for (auto& tensor : kept) {
      impl.recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
    }
    kept.clear();
  }
};

class DeviceWork : public Work {
 public:
  DeviceWork(int rank, OpType type, std::shared_ptr<Shelf> shelf, Tensors results)
      : Work(rank, type), task(std::make_shared<Task>()), end(kType), results_(std::move(results)), shelf_(std::move(shelf)) {}

  bool isCompleted() override {
    return task->done();
  }
  bool isSuccess() const override {
    return task->done() && !task->error;
  }
  std::exception_ptr exception() const override {
    return task->done() ? task->error : nullptr;
  }
  void synchronize() override {
    c10::impl::VirtualGuardImpl impl(kType);
    end.block(impl.getStream(device));
    shelf_->clear();
  }
  // Orders the caller's stream, and does not block the host: but for a barrier, or with a limit on time.
  bool wait(std::chrono::milliseconds timeout) override {
    synchronize();
    if (opType_ == OpType::BARRIER || timeout != kNoTimeout) {
      end.synchronize();
      if (auto error = exception()) {
        std::rethrow_exception(error);
      }
    }
    return true;
  }
  std::vector<at::Tensor> result() override {
    return results_;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future;
  }

  std::shared_ptr<Task> task;
  c10::Event end;
  c10::Device device{kType, 0};
  c10::intrusive_ptr<c10::ivalue::Future> future;

 private:
  Tensors results_;
  std::shared_ptr<Shelf> shelf_;
};

// One thread carries out what was queued, in that order, each when its stream has come to it.
class DeviceBackend : public Backend {
 public:
  using Act = std::function<void(Backend&)>;

  DeviceBackend(c10::intrusive_ptr<Backend> carrier, int rank, int size, std::chrono::milliseconds timeout)
      : Backend(rank, size), carrier_(std::move(carrier)), timeout_(timeout), thread_([this] { run(); }) {}

  ~DeviceBackend() override {
    end();
  }
  const std::string getBackendName() const override {
    return "standin";
  }
  void abort() override {
    aborted_ = true;
    carrier_->abort();
  }
  void shutdown() override {
    end();
  }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>("standin", timeout_);
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    timeout_ = timeout;
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return launched_;
  }

  c10::intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return launch(OpType::ALLREDUCE, tensors, tensors, tensors, opts.asyncOp, [host = all_on_host(tensors), opts](Backend& carrier) {
      reduce_all(carrier, host, opts);
    });
  }
  c10::intrusive_ptr<Work> allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    return launch(OpType::COALESCED, tensors, tensors, tensors, opts.asyncOp, [host = all_on_host(tensors), opts](Backend& carrier) {
      reduce_all(carrier, host, opts);
    });
  }
  c10::intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    return launch(OpType::BROADCAST, tensors, tensors, tensors, opts.asyncOp, [host = all_on_host(tensors), opts](Backend& carrier) mutable {
      carrier.broadcast(host, opts)->wait();
    });
  }
  c10::intrusive_ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    return launch(OpType::REDUCE, tensors, tensors, tensors, opts.asyncOp, [host = all_on_host(tensors), opts](Backend& carrier) mutable {
      carrier.reduce(host, opts)->wait();
    });
  }
  c10::intrusive_ptr<Work> allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    std::vector<Tensors> to{all_on_host(outputs[0])};
    return launch(OpType::ALLGATHER, inputs, outputs[0], outputs[0], opts.asyncOp, [to, from = all_on_host(inputs), opts](Backend& carrier) mutable {
      carrier.allgather(to, from, opts)->wait();
    });
  }
  c10::intrusive_ptr<Work> _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    return launch(OpType::_ALLGATHER_BASE, {input}, {output}, {output}, opts.asyncOp, [to = on_host(output), from = on_host(input), opts](Backend& carrier) mutable {
      carrier._allgather_base(to, from, opts)->wait();
    });
  }
  c10::intrusive_ptr<Work> allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    return launch(OpType::COALESCED, inputs, outputs, outputs, opts.asyncOp, [to = all_on_host(outputs), from = all_on_host(inputs), opts](Backend& carrier) mutable {
      carrier.allgather_into_tensor_coalesced(to, from, opts)->wait();
    });
  }
  c10::intrusive_ptr<Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    return launch(OpType::_REDUCE_SCATTER_BASE, {input}, {output}, {output}, opts.asyncOp, [to = on_host(output), from = on_host(input), opts](Backend& carrier) mutable {
      auto sums = from.clone();
      c10d::AllreduceOptions all;
      all.reduceOp = opts.reduceOp;
      reduce_all(carrier, {sums}, all);
      to.copy_(sums.view({carrier.getSize(), -1})[carrier.getRank()].view(to.sizes()));
    });
  }
  c10::intrusive_ptr<Work> alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& opts) override {
    return launch(
        OpType::ALLTOALL_BASE, {input}, {output}, {output}, opts.asyncOp,
        [to = on_host(output), from = on_host(input), out = output_sizes, in = input_sizes, opts](Backend& carrier) mutable {
          carrier.alltoall_base(to, from, out, in, opts)->wait();
        });
  }
  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions& opts) override {
    return launch(OpType::BARRIER, {}, {}, {}, true, [opts](Backend& carrier) { carrier.barrier(opts)->wait(); });
  }
  c10::intrusive_ptr<Work> send(Tensors& tensors, int to, int tag) override {
    return launch(OpType::SEND, tensors, {}, tensors, true, [host = all_on_host(tensors), to, tag](Backend& carrier) mutable {
      carrier.send(host, to, tag)->wait();
    });
  }
  c10::intrusive_ptr<Work> recv(Tensors& tensors, int from, int tag) override {
    return launch(OpType::RECV, {}, tensors, tensors, true, [host = all_on_host(tensors), from, tag](Backend& carrier) mutable {
      carrier.recv(host, from, tag)->wait();
    });
  }

 private:
  static void reduce_all(Backend& carrier, const Tensors& tensors, c10d::AllreduceOptions opts) {
    bool mean = opts.reduceOp == c10d::ReduceOp::AVG;
    if (mean) {
      opts.reduceOp = c10d::ReduceOp::SUM;
    }
    for (auto& tensor : tensors) {
      Tensors one{tensor};
      carrier.allreduce(one, opts)->wait();
      if (mean) {
        one[0].div_(carrier.getSize());
      }
    }
  }

  c10::intrusive_ptr<Work> launch(
      OpType type, const Tensors& read, const Tensors& written, const Tensors& results, bool async, Act act) {
    for (auto* tensors : {&read, &written}) {
      for (auto& tensor : *tensors) {
        TORCH_CHECK(tensor.device().type() == kType, "No backend type associated with device type ", tensor.device());
        TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous");
      }
    }
    c10::impl::VirtualGuardImpl impl(kType);
    auto device = !read.empty() ? read[0].device() : !written.empty() ? written[0].device() : impl.getDevice();
    c10::OptionalDeviceGuard on(device);
    auto current = impl.getStream(device);
    auto stream = async ? own_stream(device) : current;
    auto shelf = std::make_shared<Shelf>();
    if (async) {
      shelf->kept = read;
      shelf->kept.insert(shelf->kept.end(), written.begin(), written.end());
    }
    auto work = c10::make_intrusive<DeviceWork>(rank_, type, shelf, results);
    work->device = device;
    if (async) {
      c10::Event begin(kType);
      begin.record(current);
      begin.block(stream);
    }
    std::vector<Entry> ranges;
    add_ranges(ranges, read, false);
    add_ranges(ranges, written, true);
    queue(work->task, stream, std::move(ranges));
    work->end.record(stream);
    {
      std::lock_guard<std::mutex> guard(mutex_);
      queued_.push_back({work->task, shelf, stream, std::move(act)});
      launched_++;
      changed_.notify_all();
    }
    work->future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device});
    c10::StreamGuard within(stream);
    work->future->markCompleted(c10::IValue(results));
    return work;
  }

  c10::Stream own_stream(c10::Device device) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = streams_.find(device.index());
    if (found == streams_.end()) {
      found = streams_.emplace(device.index(), new_stream(device.index())).first;
    }
    return found->second;
  }

  void run() {
    while (true) {
      std::unique_lock<std::mutex> guard(mutex_);
      changed_.wait(guard, [this] { return ended_ || !queued_.empty(); });
      if (queued_.empty()) {
        return;
      }
      auto [task, shelf, stream, act] = std::move(queued_.front());
      queued_.pop_front();
      guard.unlock();
      for (auto& before : std::exchange(task->after, {})) {
        before->wait();
      }
      try {
        act(*carrier_);
      } catch (...) {
        hang();
        task->error = std::current_exception();
      }
      task->finish();
      shelf->clear_when_over(stream);
    }
  }

  // As a kernel that waits for a rank that is gone: until somebody aborts it, or its time is over.
  void hang() {
    auto until = std::chrono::steady_clock::now() + timeout_;
    while (!aborted_ && !ended_ && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }

  void end() {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      ended_ = true;
      changed_.notify_all();
    }
    if (thread_.joinable()) {
      thread_.join();
    }
  }

  c10::intrusive_ptr<Backend> carrier_;
  std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::condition_variable changed_;
  struct Queued {
    std::shared_ptr<Task> task;
    std::shared_ptr<Shelf> shelf;
    c10::Stream stream;
    Act act;
  };
  std::deque<Queued> queued_;
  std::map<c10::DeviceIndex, c10::Stream> streams_;
  std::atomic<uint64_t> launched_{0};
  std::atomic<bool> aborted_{false}, ended_{false};
  std::thread thread_;
};

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("take_told", [] {
    std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t>> found;
    for (auto& entry : take_told()) {
      found.emplace_back(entry.kind, entry.a, entry.b, entry.c);
    }
    return found;
  });
  m.def("on_host", &on_host);
  // A number that came out of a tensor on its way to Python, as the tensor that it was.
  m.def("wrapped", [](const at::Tensor& number) {
    number.unsafeGetTensorImpl()->set_wrapped_number(true);
    return number;
  });
  m.def("stream_key", [](int64_t device) { return key(current_stream(device)); });
  m.def(
      "await_current_stream",
      [](int64_t device) { await_stream(current_stream(device)); },
      py::call_guard<py::gil_scoped_release>());
  py::class_<DeviceBackend, c10::intrusive_ptr<DeviceBackend>, Backend>(m, "DeviceBackend")
      .def(
          py::init([](c10::intrusive_ptr<Backend> carrier, int rank, int size, double seconds) {
            auto limit = std::chrono::milliseconds(int64_t(seconds * 1000));
            return c10::make_intrusive<DeviceBackend>(std::move(carrier), rank, size, limit);
          }));
}

} // namespace standin
