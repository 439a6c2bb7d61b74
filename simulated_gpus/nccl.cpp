// SPDX-License-Identifier: Apache-2.0
// NCCL without a GPU: a process group that refuses what NCCL refuses and lets gloo move the bytes. A collective is done
// when its call returns, a message when it was waited for; which streams would have to wait, `races.cpp` is told. On
// simulated GPUs gloo works on the bytes where they lie; with SHARED_GPU set, on copies, so that several processes can
// share a real GPU, which NCCL refuses.

#include "device.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include <cstdlib>
#include <map>
#include <mutex>

namespace simulated {  // which no real GPU has
void __attribute__((weak)) used(const at::Tensor& tensor, bool is_write, const std::string& by);
std::pair<int64_t, int64_t> __attribute__((weak)) progress();
}  // namespace simulated

namespace {

using c10d::Work;
using Tensors = std::vector<at::Tensor>;

std::mutex counts_lock;
std::map<std::string, std::pair<int64_t, int64_t>> counts;  // by collective: calls, bytes

bool is_shared() {
  static const bool answer = std::getenv("SHARED_GPU") != nullptr;
  return answer;
}

// What a process asked of NCCL, in its order.
struct Asked {
  std::string group, name, type;
  std::vector<int64_t> sizes;  // elements of each tensor; of all_to_all those for each rank, then those from each
  int64_t peer;                // rank of the root, or of the other end of a message; else -1
  int64_t batch;               // equal for those that NCCL begins at once; else -1
  int64_t begun, done;         // uses of memory by the default stream: all, and those that it comes after
};
constexpr size_t kMostAsked = 100000;
std::vector<Asked> asked;
std::map<std::string, std::vector<uint64_t>> ranks_of;

// As in CUDA: begun after what the current stream has, on that stream or on NCCL's own, which the wait then waits for.
class Done : public Work {
 public:
  Done(int rank, c10d::OpType type, const std::string& name, Tensors out, const Tensors& in,
       std::optional<c10::Stream> stream)
      : Work(rank, type), out_(std::move(out)), held_(in) {
    held_.insert(held_.end(), out_.begin(), out_.end());
    std::vector<c10::Device> devices;
    if (!held_.empty()) devices.push_back(held_[0].device());
    c10::OptionalStreamGuard guard;
    if (stream) {
      at_begin_.record(c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(stream->device()));
      at_begin_.block(*stream);
      guard.reset_stream(*stream);
    }
    if (!is_shared()) {
      for (const auto& tensor : in) simulated::used(tensor, false, name);
      for (const auto& tensor : out_) simulated::used(tensor, true, name);
    }
    if (stream) at_end_.record(*stream);
    stream_ = stream;
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    future_->markCompleted(c10::IValue(out_));
  }
  ~Done() override {
    for (const auto& tensor : held_) {  // NCCL's watchdog keeps what nobody waited for
      if (stream_) c10::impl::VirtualGuardImpl(c10::kCUDA).recordDataPtrOnStream(tensor.storage().data_ptr(), *stream_);
    }
  }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    if (stream_) at_end_.block(c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(stream_->device()));
    held_.clear();
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  Tensors result() override { return out_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 protected:
  Tensors out_;

 private:
  Tensors held_;
  std::optional<c10::Stream> stream_;
  c10::Event at_begin_{c10::kCUDA}, at_end_{c10::kCUDA};
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// A message, which the two processes may begin in any order, as NCCL's of a batch.
class Message final : public Done {
 public:
  Message(int rank, c10d::OpType type, const std::string& name, Tensors out, const Tensors& in,
          std::optional<c10::Stream> stream, c10::intrusive_ptr<Work> work, Tensors on_host)
      : Done(rank, type, name, std::move(out), in, stream), work_(std::move(work)), on_host_(std::move(on_host)) {}
  bool isCompleted() override { return is_done_; }
  bool isSuccess() const override { return is_done_; }
  bool wait(std::chrono::milliseconds timeout) override {
    if (!is_done_) {
      work_->wait(timeout);
      for (size_t i = 0; i < out_.size() && is_shared(); i++) out_[i].detach().copy_(on_host_[i]);  // autograd may await it
      is_done_ = true;
    }
    return Done::wait(timeout);
  }

 private:
  bool is_done_ = false;
  c10::intrusive_ptr<Work> work_;
  Tensors on_host_;
};

// What NCCL begins at once, and one wait waits for.
class Batch final : public Work {
 public:
  Batch(int rank, std::vector<c10::intrusive_ptr<Work>> works)
      : Work(rank, c10d::OpType::COALESCED), works_(std::move(works)) {}
  bool isCompleted() override { return is_done_; }
  bool isSuccess() const override { return is_done_; }
  bool wait(std::chrono::milliseconds timeout) override {
    for (auto& work : works_) work->wait(timeout);
    is_done_ = true;
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }

 private:
  bool is_done_ = false;
  std::vector<c10::intrusive_ptr<Work>> works_;
};

class SimulatedNCCL : public c10d::Backend {
 public:
  struct Options : c10d::Backend::Options {
    explicit Options(bool high = false) : c10d::Backend::Options("nccl"), is_high_priority_stream(high) {}
    bool is_high_priority_stream;
    py::object config = py::none();
    py::object split_from = py::none();
    int64_t split_color = 0;
  };

  SimulatedNCCL(c10::intrusive_ptr<c10d::Store> store, c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size,
                c10::intrusive_ptr<Options> options)
      : Backend(rank, size), store_(std::move(store)), gloo_(std::move(gloo)), options_(std::move(options)) {
    std::lock_guard<std::mutex> guard(counts_lock);
    ranks_of[options_->group_name] = options_->global_ranks_in_group;
  }

  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  c10d::ErrorType getError() override { return c10d::ErrorType::SUCCESS; }
  void shutdown() override { gloo_->shutdown(); }
  void abort() override { gloo_->abort(); }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { batch_ = num_batches_++; }
  c10::intrusive_ptr<Work> endCoalescing() override {
    batch_ = -1;
    return c10::make_intrusive<Batch>(rank_, std::exchange(works_, {}));
  }

  c10::intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& given) override {
    auto on_host = begin("all_reduce", tensors, told(given.reduceOp));
    auto options = given;
    options.reduceOp = for_gloo(given.reduceOp);
    gloo_->allreduce(on_host, options)->wait();
    average(given.reduceOp, on_host);
    return end(c10d::OpType::ALLREDUCE, "all_reduce", tensors, on_host, tensors, given.asyncOp);
  }
  c10::intrusive_ptr<Work> allreduce_coalesced(Tensors& tensors,
                                               const c10d::AllreduceCoalescedOptions& options) override {
    std::vector<c10::intrusive_ptr<Work>> works;
    for (auto& tensor : tensors) {
      Tensors one{tensor};
      works.push_back(allreduce(one, options));
    }
    return c10::make_intrusive<Batch>(rank_, std::move(works));
  }
  c10::intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto on_host = begin("broadcast", tensors, "", options.rootRank);
    gloo_->broadcast(on_host, options)->wait();
    return end(c10d::OpType::BROADCAST, "broadcast", tensors, on_host, tensors, options.asyncOp);
  }
  c10::intrusive_ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& given) override {
    auto on_host = begin("reduce", tensors, told(given.reduceOp), given.rootRank);
    auto options = given;
    options.reduceOp = for_gloo(given.reduceOp);
    gloo_->reduce(on_host, options)->wait();
    average(given.reduceOp, on_host);
    return end(c10d::OpType::REDUCE, "reduce", tensors, on_host, tensors, given.asyncOp);
  }
  c10::intrusive_ptr<Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                     const c10d::AllgatherOptions& options) override {
    auto in = begin("all_gather", inputs);
    std::vector<Tensors> out;
    for (auto& list : outputs) out.push_back(begin("", list));
    gloo_->allgather(out, in, options)->wait();
    for (size_t i = 0; i < outputs.size(); i++) deliver(outputs[i], out[i]);
    return done(c10d::OpType::ALLGATHER, "all_gather", outputs[0], inputs, options.asyncOp);
  }
  c10::intrusive_ptr<Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::AllgatherOptions& options) override {
    TORCH_CHECK(input.dtype() == output.dtype(), "output tensor must have the same type as input tensor");
    TORCH_CHECK(input.numel() * size_ == output.numel(),
                "output tensor size must be equal to world_size times input tensor size");
    return gather_flat(output, input, options);
  }
  c10::intrusive_ptr<Work> allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                           const c10d::AllgatherOptions& options) override {
    std::vector<c10::intrusive_ptr<Work>> works;
    for (size_t i = 0; i < outputs.size(); i++) works.push_back(gather_flat(outputs[i], inputs[i], options));
    return c10::make_intrusive<Batch>(rank_, std::move(works));
  }
  c10::intrusive_ptr<Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(input.dtype() == output.dtype(), "input tensor must be the same type as the output tensor.");
    TORCH_CHECK(input.numel() == output.numel() * size_,
                "input tensor must be the same size as output size times world size");
    return scatter_flat(output, input, options);
  }
  c10::intrusive_ptr<Work> reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                           const c10d::ReduceScatterOptions& options) override {
    std::vector<c10::intrusive_ptr<Work>> works;
    for (size_t i = 0; i < outputs.size(); i++) works.push_back(scatter_flat(outputs[i], inputs[i], options));
    return c10::make_intrusive<Batch>(rank_, std::move(works));
  }
  c10::intrusive_ptr<Work> reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    std::vector<c10::intrusive_ptr<Work>> works;
    for (size_t i = 0; i < outputs.size(); i++) {
      Tensors parts;
      for (auto& part : inputs[i]) parts.push_back(part.reshape(-1));
      works.push_back(scatter_flat(outputs[i], at::cat(parts), options));
    }
    return c10::make_intrusive<Batch>(rank_, std::move(works));
  }
  c10::intrusive_ptr<Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                                         std::vector<int64_t>& input_sizes,
                                         const c10d::AllToAllOptions& options) override {
    auto out = begin("all_to_all", {output}, "", -1, rows_of(input, input_sizes), rows_of(output, output_sizes));
    auto in = begin("", {input});
    gloo_->alltoall_base(out[0], in[0], output_sizes, input_sizes, options)->wait();
    return end(c10d::OpType::ALLTOALL_BASE, "all_to_all", {output}, out, {input}, options.asyncOp);
  }
  c10::intrusive_ptr<Work> scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                   const c10d::ScatterOptions& options) override {
    auto out = begin("scatter", outputs, "", options.rootRank);
    std::vector<Tensors> in;
    for (auto& list : inputs) in.push_back(begin("", list));
    gloo_->scatter(out, in, options)->wait();
    return end(c10d::OpType::SCATTER, "scatter", outputs, out, inputs.empty() ? Tensors{} : inputs[0], options.asyncOp);
  }
  c10::intrusive_ptr<Work> gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                  const c10d::GatherOptions& options) override {
    auto in = begin("gather", inputs, "", options.rootRank);
    std::vector<Tensors> out;
    for (auto& list : outputs) out.push_back(begin("", list));
    gloo_->gather(out, in, options)->wait();
    for (size_t i = 0; i < outputs.size(); i++) deliver(outputs[i], out[i]);
    return done(c10d::OpType::GATHER, "gather", outputs.empty() ? Tensors{} : outputs[0], inputs, options.asyncOp);
  }
  c10::intrusive_ptr<Work> send(Tensors& tensors, int to, int tag) override {
    auto on_host = begin("send", tensors, "", to);
    auto work = gloo_->send(on_host, to, tag);
    return kept(c10::make_intrusive<Message>(rank_, c10d::OpType::SEND, "send", Tensors{}, tensors,
                                             stream_to(tensors[0].device(), to), work, on_host));
  }
  c10::intrusive_ptr<Work> recv(Tensors& tensors, int from, int tag) override {
    auto on_host = begin("recv", tensors, "", from);
    auto work = gloo_->recv(on_host, from, tag);
    return kept(c10::make_intrusive<Message>(rank_, c10d::OpType::RECV, "recv", tensors, Tensors{},
                                             stream_to(tensors[0].device(), from), work, on_host));
  }
  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions& options) override {
    log("barrier", {}, "", {}, -1);
    gloo_->barrier(options)->wait();
    return done(c10d::OpType::BARRIER, "barrier", {}, {}, false);
  }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  c10::intrusive_ptr<c10d::Backend> gloo_;
  c10::intrusive_ptr<Options> options_;
  bool has_met_ = false;
  std::map<int, c10::Stream> streams_;
  int64_t batch_ = -1, num_batches_ = 0;
  std::vector<c10::intrusive_ptr<Work>> works_;

  // Of this group, or of two of its ranks for a message that is not one of a batch, as ProcessGroupNCCL has them.
  std::optional<c10::Stream> stream_to(at::Device device, int peer) {
    if (is_shared()) return {};
    const int key = batch_ < 0 ? peer : -1;
    auto found = streams_.find(key);
    if (found == streams_.end()) {
      found = streams_.emplace(key, c10::impl::VirtualGuardImpl(c10::kCUDA).getNewStream(device)).first;
    }
    return found->second;
  }

  c10::intrusive_ptr<Work> kept(c10::intrusive_ptr<Work> work) {
    if (batch_ >= 0) works_.push_back(work);
    return work;
  }

  c10::intrusive_ptr<Work> done(c10d::OpType type, const std::string& name, Tensors out, const Tensors& in,
                                bool is_async) {
    const bool has_tensor = !out.empty() || !in.empty();
    auto stream = is_async && has_tensor ? stream_to((out.empty() ? in : out)[0].device(), -1) : std::nullopt;
    return kept(c10::make_intrusive<Done>(rank_, type, name, std::move(out), in, stream));
  }

  void log(const std::string& name, const std::string& type, const std::string& operation, std::vector<int64_t> sizes,
           int peer) {
    std::lock_guard<std::mutex> guard(counts_lock);
    if (asked.size() == kMostAsked) return;
    const auto& ranks = options_->global_ranks_in_group;
    const int64_t other = peer < 0 || ranks.empty() ? peer : static_cast<int64_t>(ranks[peer]);
    const auto [begun, done] = is_shared() ? std::pair<int64_t, int64_t>() : simulated::progress();
    asked.push_back({options_->group_name, name + operation, type, std::move(sizes), other, batch_, begun, done});
  }

  static std::string told(const c10d::ReduceOp& op) { return " " + std::to_string(static_cast<int>(op.op_)); }

  // Elements to or from each rank; without sizes all ranks have as many.
  std::vector<int64_t> rows_of(const at::Tensor& tensor, const std::vector<int64_t>& sizes) {
    if (sizes.empty()) return std::vector<int64_t>(size_, tensor.numel() / size_);
    std::vector<int64_t> found;
    for (auto rows : sizes) found.push_back(tensor.size(0) ? rows * (tensor.numel() / tensor.size(0)) : 0);
    return found;
  }

  // What ProcessGroupNCCL checks, then the bytes as tensors that gloo takes. Logged and counted, if it has a name.
  Tensors begin(const std::string& name, const Tensors& tensors, const std::string& operation = "", int peer = -1,
                std::vector<int64_t> sent = {}, const std::vector<int64_t>& received = {}) {
    Tensors on_host;
    int64_t bytes = 0;
    const bool has_sizes = !sent.empty();
    sent.insert(sent.end(), received.begin(), received.end());
    for (const auto& tensor : tensors) {
      TORCH_CHECK(tensor.is_cuda() && !tensor.is_sparse(), "Tensors must be CUDA and dense (", name, ", got ",
                  tensor.device(), ", in NCCL's place)");
      TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous (", name, ", in NCCL's place)");
      TORCH_CHECK(tensor.scalar_type() != at::kShort && tensor.scalar_type() != at::kUInt16,
                  "Unsupported data type for NCCL process group");
      meet(tensor.device().index());
      // gloo's thread lets go of its operation at some moment after the wait: a collective is over by then, and held by it
      // a tensor would be freed late.
      const at::Tensor owner = peer < 0 ? at::Tensor() : tensor;
      on_host.push_back(is_shared() ? tensor.cpu()
                                    : at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(),
                                                    tensor.strides(), [owner](void*) {},
                                                    tensor.options().device(at::kCPU), at::Device(at::kCPU)));
      bytes += tensor.nbytes();
      if (!has_sizes) sent.push_back(tensor.numel());
    }
    if (name.empty()) return on_host;
    log(name, tensors.empty() ? "" : c10::toString(tensors[0].scalar_type()), operation, std::move(sent), peer);
    std::lock_guard<std::mutex> guard(counts_lock);
    counts[name].first++;
    counts[name].second += bytes;
    return on_host;
  }

  void deliver(const Tensors& tensors, const Tensors& on_host) {
    for (size_t i = 0; i < tensors.size() && is_shared(); i++) tensors[i].detach().copy_(on_host[i]);
  }

  c10::intrusive_ptr<Work> end(c10d::OpType type, const std::string& name, const Tensors& out, const Tensors& on_host,
                               const Tensors& in, bool is_async) {
    deliver(out, on_host);
    return done(type, name, out, in, is_async);
  }

  // NCCL refuses two processes on one GPU when they first meet. A machine is a launcher's GROUP_RANK.
  void meet(int device) {
    if (has_met_ || is_shared()) return;
    has_met_ = true;
    const char* machine = std::getenv("GROUP_RANK");
    auto mine = std::string(machine ? machine : "0") + "/" + std::to_string(device);
    store_->set("device of " + std::to_string(rank_), mine);
    for (int other = 0; other < size_; other++) {
      auto theirs = store_->get_to_str("device of " + std::to_string(other));
      TORCH_CHECK(other == rank_ || theirs != mine, "ncclInvalidUsage: Duplicate GPU detected: rank ", rank_,
                  " and rank ", other, " both on CUDA device ", device, " (simulated)");
    }
  }

  // gloo has neither AVG nor PREMUL_SUM.
  c10d::ReduceOp for_gloo(const c10d::ReduceOp& op) {
    TORCH_CHECK(op != c10d::ReduceOp::PREMUL_SUM, "PREMUL_SUM is not simulated");
    return op == c10d::ReduceOp::AVG ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
  }
  void average(const c10d::ReduceOp& op, Tensors& tensors) {
    if (op == c10d::ReduceOp::AVG) {
      for (auto& tensor : tensors) tensor.div_(size_);
    }
  }

  c10::intrusive_ptr<Work> gather_flat(const at::Tensor& output, const at::Tensor& input,
                                       const c10d::AllgatherOptions& options) {
    const std::string name = "all_gather_into_tensor";
    auto in = begin(name, {input})[0].reshape(-1).clone();  // it may be a part of the output
    auto whole = begin("", {output});
    std::vector<Tensors> parts{whole[0].view(-1).chunk(size_)};
    Tensors inputs{in};
    gloo_->allgather(parts, inputs, options)->wait();
    return end(c10d::OpType::_ALLGATHER_BASE, name, {output}, whole, {input}, options.asyncOp);
  }
  c10::intrusive_ptr<Work> scatter_flat(const at::Tensor& output, const at::Tensor& input,
                                        const c10d::ReduceScatterOptions& options) {
    const std::string name = "reduce_scatter_tensor";
    Tensors whole{begin(name, {input}, told(options.reduceOp))[0].reshape(-1).clone()};
    auto part = begin("", {output});
    c10d::AllreduceOptions reduce;
    reduce.timeout = options.timeout;
    reduce.reduceOp = for_gloo(options.reduceOp);
    gloo_->allreduce(whole, reduce)->wait();
    average(options.reduceOp, whole);
    part[0].copy_(whole[0].narrow(0, rank_ * output.numel(), output.numel()).view_as(part[0]));
    return end(c10d::OpType::_REDUCE_SCATTER_BASE, name, {output}, part, {input}, options.asyncOp);
  }
};

}  // namespace

PYBIND11_MODULE(simulated_nccl, m) {
  py::module_::import("torch._C._distributed_c10d");
  py::class_<SimulatedNCCL, c10d::Backend, c10::intrusive_ptr<SimulatedNCCL>> backend(m, "ProcessGroupNCCL");
  py::class_<SimulatedNCCL::Options, c10d::Backend::Options, c10::intrusive_ptr<SimulatedNCCL::Options>>(backend,
                                                                                                      "Options")
      .def(py::init<bool>(), py::arg("is_high_priority_stream") = false)
      .def_readwrite("is_high_priority_stream", &SimulatedNCCL::Options::is_high_priority_stream)
      .def_readwrite("split_from", &SimulatedNCCL::Options::split_from)
      .def_readwrite("split_color", &SimulatedNCCL::Options::split_color)
      .def_readwrite("config", &SimulatedNCCL::Options::config);
  backend.def(py::init<c10::intrusive_ptr<c10d::Store>, c10::intrusive_ptr<c10d::Backend>, int, int,
                       c10::intrusive_ptr<SimulatedNCCL::Options>>(),
              py::call_guard<py::gil_scoped_release>());
  m.def("counts", [] {
    std::lock_guard<std::mutex> guard(counts_lock);
    return counts;
  });
  m.def("asked", [] {
    std::lock_guard<std::mutex> guard(counts_lock);
    py::list found;
    for (const auto& one : asked) {
      found.append(py::make_tuple(one.group, one.name, one.type, one.sizes, one.peer, one.batch, one.begun, one.done));
    }
    return found;
  });
  m.def("ranks_of", [] {
    std::lock_guard<std::mutex> guard(counts_lock);
    return ranks_of;
  });
}
