// NCCL without a GPU: a process group that refuses what NCCL refuses and lets gloo move the bytes. A collective is done
// when its call returns, a message when it was waited for. On simulated GPUs gloo works on the bytes where they lie; with SHARED_GPU set, on copies, so that
// several processes can share a real GPU, which NCCL refuses.

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include <cstdlib>
#include <map>
#include <mutex>

namespace {

using c10d::Work;
using Tensors = std::vector<at::Tensor>;

std::mutex counts_lock;
std::map<std::string, std::pair<int64_t, int64_t>> counts;  // by collective: calls, bytes

bool is_shared() {
  static const bool answer = std::getenv("SHARED_GPU") != nullptr;
  return answer;
}

class Done final : public Work {
 public:
  Done(int rank, c10d::OpType type, Tensors out) : Work(rank, type), out_(std::move(out)) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future_->markCompleted(c10::IValue(out_));
  }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  void synchronize() override {}
  void blockCurrentStream() override {}
  Tensors result() override { return out_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  Tensors out_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// A message, which the two processes may begin in any order, as NCCL's of a batch.
class Message final : public Work {
 public:
  Message(int rank, c10d::OpType type, c10::intrusive_ptr<Work> work, Tensors out, Tensors on_host)
      : Work(rank, type), work_(std::move(work)), out_(std::move(out)), on_host_(std::move(on_host)) {}
  bool isCompleted() override { return is_done_; }
  bool isSuccess() const override { return is_done_; }
  bool wait(std::chrono::milliseconds timeout) override {
    if (!is_done_) {
      work_->wait(timeout);
      for (size_t i = 0; i < out_.size() && is_shared(); i++) out_[i].detach().copy_(on_host_[i]);  // autograd may await it
      is_done_ = true;
    }
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  Tensors result() override { return out_; }

 private:
  bool is_done_ = false;
  c10::intrusive_ptr<Work> work_;
  Tensors out_, on_host_;
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
      : Backend(rank, size), store_(std::move(store)), gloo_(std::move(gloo)), options_(std::move(options)) {}

  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  c10d::ErrorType getError() override { return c10d::ErrorType::SUCCESS; }
  void shutdown() override { gloo_->shutdown(); }
  void abort() override { gloo_->abort(); }

  c10::intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& given) override {
    auto on_host = begin("all_reduce", tensors);
    auto options = given;
    options.reduceOp = for_gloo(given.reduceOp);
    gloo_->allreduce(on_host, options)->wait();
    average(given.reduceOp, on_host);
    return end(c10d::OpType::ALLREDUCE, tensors, on_host);
  }
  c10::intrusive_ptr<Work> allreduce_coalesced(Tensors& tensors,
                                               const c10d::AllreduceCoalescedOptions& options) override {
    for (auto& tensor : tensors) {
      Tensors one{tensor};
      allreduce(one, options);
    }
    return done(c10d::OpType::ALLREDUCE_COALESCED, tensors);
  }
  c10::intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto on_host = begin("broadcast", tensors);
    gloo_->broadcast(on_host, options)->wait();
    return end(c10d::OpType::BROADCAST, tensors, on_host);
  }
  c10::intrusive_ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& given) override {
    auto on_host = begin("reduce", tensors);
    auto options = given;
    options.reduceOp = for_gloo(given.reduceOp);
    gloo_->reduce(on_host, options)->wait();
    average(given.reduceOp, on_host);
    return end(c10d::OpType::REDUCE, tensors, on_host);
  }
  c10::intrusive_ptr<Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                     const c10d::AllgatherOptions& options) override {
    auto in = begin("all_gather", inputs);
    std::vector<Tensors> out;
    for (auto& list : outputs) out.push_back(begin("", list));
    gloo_->allgather(out, in, options)->wait();
    for (size_t i = 0; i < outputs.size(); i++) end(c10d::OpType::ALLGATHER, outputs[i], out[i]);
    return done(c10d::OpType::ALLGATHER, outputs[0]);
  }
  c10::intrusive_ptr<Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::AllgatherOptions& options) override {
    TORCH_CHECK(input.dtype() == output.dtype(), "output tensor must have the same type as input tensor");
    TORCH_CHECK(input.numel() * size_ == output.numel(),
                "output tensor size must be equal to world_size times input tensor size");
    gather_flat("all_gather_into_tensor", output, input, options);
    return done(c10d::OpType::_ALLGATHER_BASE, {output});
  }
  c10::intrusive_ptr<Work> allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                           const c10d::AllgatherOptions& options) override {
    for (size_t i = 0; i < outputs.size(); i++) gather_flat("all_gather_into_tensor", outputs[i], inputs[i], options);
    return done(c10d::OpType::COALESCED, outputs);
  }
  c10::intrusive_ptr<Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(input.dtype() == output.dtype(), "input tensor must be the same type as the output tensor.");
    TORCH_CHECK(input.numel() == output.numel() * size_,
                "input tensor must be the same size as output size times world size");
    scatter_flat(output, input, options);
    return done(c10d::OpType::_REDUCE_SCATTER_BASE, {output});
  }
  c10::intrusive_ptr<Work> reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                           const c10d::ReduceScatterOptions& options) override {
    for (size_t i = 0; i < outputs.size(); i++) scatter_flat(outputs[i], inputs[i], options);
    return done(c10d::OpType::COALESCED, outputs);
  }
  c10::intrusive_ptr<Work> reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    for (size_t i = 0; i < outputs.size(); i++) {
      Tensors parts;
      for (auto& part : inputs[i]) parts.push_back(part.reshape(-1));
      auto whole = at::cat(parts);
      scatter_flat(outputs[i], whole, options);
    }
    return done(c10d::OpType::REDUCE_SCATTER, outputs);
  }
  c10::intrusive_ptr<Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                                         std::vector<int64_t>& input_sizes,
                                         const c10d::AllToAllOptions& options) override {
    auto out = begin("all_to_all", {output}), in = begin("", {input});
    gloo_->alltoall_base(out[0], in[0], output_sizes, input_sizes, options)->wait();
    return end(c10d::OpType::ALLTOALL_BASE, {output}, out);
  }
  c10::intrusive_ptr<Work> scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                   const c10d::ScatterOptions& options) override {
    auto out = begin("scatter", outputs);
    std::vector<Tensors> in;
    for (auto& list : inputs) in.push_back(begin("", list));
    gloo_->scatter(out, in, options)->wait();
    return end(c10d::OpType::SCATTER, outputs, out);
  }
  c10::intrusive_ptr<Work> gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                  const c10d::GatherOptions& options) override {
    auto in = begin("gather", inputs);
    std::vector<Tensors> out;
    for (auto& list : outputs) out.push_back(begin("", list));
    gloo_->gather(out, in, options)->wait();
    for (size_t i = 0; i < outputs.size(); i++) end(c10d::OpType::GATHER, outputs[i], out[i]);
    return done(c10d::OpType::GATHER, inputs);
  }
  c10::intrusive_ptr<Work> send(Tensors& tensors, int to, int tag) override {
    auto on_host = begin("send", tensors);
    auto work = gloo_->send(on_host, to, tag);
    return c10::make_intrusive<Message>(rank_, c10d::OpType::SEND, work, Tensors{}, on_host);
  }
  c10::intrusive_ptr<Work> recv(Tensors& tensors, int from, int tag) override {
    auto on_host = begin("recv", tensors);
    auto work = gloo_->recv(on_host, from, tag);
    return c10::make_intrusive<Message>(rank_, c10d::OpType::RECV, work, tensors, on_host);
  }
  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions& options) override {
    gloo_->barrier(options)->wait();
    return done(c10d::OpType::BARRIER, {});
  }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  c10::intrusive_ptr<c10d::Backend> gloo_;
  c10::intrusive_ptr<Options> options_;
  bool has_met_ = false;

  c10::intrusive_ptr<Work> done(c10d::OpType type, Tensors out) {
    return c10::make_intrusive<Done>(rank_, type, std::move(out));
  }

  // What ProcessGroupNCCL checks, then the bytes as tensors that gloo takes.
  Tensors begin(const std::string& name, const Tensors& tensors) {
    Tensors on_host;
    int64_t bytes = 0;
    for (const auto& tensor : tensors) {
      TORCH_CHECK(tensor.is_cuda() && !tensor.is_sparse(), "Tensors must be CUDA and dense (", name, ", got ",
                  tensor.device(), ", in NCCL's place)");
      TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous (", name, ", in NCCL's place)");
      TORCH_CHECK(tensor.scalar_type() != at::kShort && tensor.scalar_type() != at::kUInt16,
                  "Unsupported data type for NCCL process group");
      meet(tensor.device().index());
      on_host.push_back(is_shared() ? tensor.cpu()
                                    : at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(),
                                                    tensor.strides(), [tensor](void*) {},
                                                    tensor.options().device(at::kCPU), at::Device(at::kCPU)));
      bytes += tensor.nbytes();
    }
    if (!name.empty()) {
      std::lock_guard<std::mutex> guard(counts_lock);
      counts[name].first++;
      counts[name].second += bytes;
    }
    return on_host;
  }

  c10::intrusive_ptr<Work> end(c10d::OpType type, const Tensors& tensors, const Tensors& on_host) {
    if (is_shared()) {
      for (size_t i = 0; i < tensors.size(); i++) tensors[i].detach().copy_(on_host[i]);
    }
    return done(type, tensors);
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

  void gather_flat(const std::string& name, const at::Tensor& output, const at::Tensor& input,
                   const c10d::AllgatherOptions& options) {
    auto in = begin(name, {input})[0].reshape(-1).clone();  // it may be a part of the output
    auto whole = begin("", {output});
    std::vector<Tensors> parts{whole[0].view(-1).chunk(size_)};
    Tensors inputs{in};
    gloo_->allgather(parts, inputs, options)->wait();
    end(c10d::OpType::_ALLGATHER_BASE, {output}, whole);
  }
  void scatter_flat(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceScatterOptions& options) {
    Tensors whole{begin("reduce_scatter_tensor", {input})[0].reshape(-1).clone()};
    auto part = begin("", {output});
    c10d::AllreduceOptions reduce;
    reduce.timeout = options.timeout;
    reduce.reduceOp = for_gloo(options.reduceOp);
    gloo_->allreduce(whole, reduce)->wait();
    average(options.reduceOp, whole);
    part[0].copy_(whole[0].narrow(0, rank_ * output.numel(), output.numel()).view_as(part[0]));
    end(c10d::OpType::_REDUCE_SCATTER_BASE, {output}, part);
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
}
