// SPDX-License-Identifier: Apache-2.0
// Attention as CUDA chooses and calls it: flash for 16 bits without a mask, memory-efficient for what flash does not
// take, else the products and T x T scores of the composite. Each kernel demands what the real one demands, allocates
// what the real one allocates (outputs and temporaries), and lets torch's CPU attention compute the numbers.
//
// Demands and allocations: aten/src/ATen/native/transformers/cuda/{sdp_utils,attention,attention_backward}.cu(pp) and
// flash_attn/flash_api.cpp of torch 2.13. B samples, H heads, T tokens, D head size.

#include "device.h"

#include <ATen/Context.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <torch/library.h>

#include <cmath>

namespace simulated {

using at::Tensor;
using Scale = std::optional<double>;

// A CPU tensor on the same bytes; the tensor of the device must outlive it.
static Tensor host(const Tensor& tensor) {
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
                       tensor.options().device(at::kCPU));
}

static void ran(const std::string& name, const std::vector<Tensor>& read, const std::vector<Tensor>& written) {
  called(name);
  for (const auto& tensor : read) used(tensor, false, name);
  for (const auto& tensor : written) used(tensor, true, name);
}

static Tensor single(const Tensor& tensor) { return tensor.to(at::kFloat); }

static std::optional<Tensor> single(const std::optional<Tensor>& bias) {
  return bias && bias->scalar_type() != at::kBool ? std::optional<Tensor>(single(*bias)) : bias;
}

static Tensor repeat_heads(const Tensor& grouped, int64_t num_heads) {  // (B, H, T, D)
  return grouped.size(1) == num_heads ? grouped : grouped.repeat_interleave(num_heads / grouped.size(1), 1);
}

static Tensor sum_heads(const Tensor& gradient, int64_t num_groups) {  // (B, H, T, D)
  if (gradient.size(1) == num_groups) return gradient;
  auto shape = gradient.sizes().vec();
  return gradient.view({shape[0], num_groups, shape[1] / num_groups, shape[2], shape[3]}).sum(2);
}

// CPU tensors (B, H, T, D) in; the output in float32, as all is computed here (device.cpp, product_in_float32), and the
// logarithms of the sums, (B, H, T) float32.
static std::tuple<Tensor, Tensor> compute(const Tensor& query, const Tensor& key, const Tensor& value, bool is_causal,
                                          const std::optional<Tensor>& bias, Scale scale) {
  auto heads = query.size(1);
  return at::_scaled_dot_product_flash_attention_for_cpu(single(query), single(repeat_heads(key, heads)),
                                                         single(repeat_heads(value, heads)), 0.0, is_causal,
                                                         single(bias), scale);
}

static std::tuple<Tensor, Tensor, Tensor> compute_backward(const Tensor& gradient, const Tensor& query,
                                                           const Tensor& key, const Tensor& value, const Tensor& out,
                                                           const Tensor& sums, bool is_causal,
                                                           const std::optional<Tensor>& bias, Scale scale) {
  auto heads = query.size(1), groups = key.size(1);
  auto of_rows = sums.transpose(1, 2).contiguous().transpose(1, 2);  // as the forward on the CPU lays them out
  auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      single(gradient), single(query), single(repeat_heads(key, heads)), single(repeat_heads(value, heads)), single(out),
      of_rows, 0.0, is_causal, single(bias), scale);
  return {of_query, sum_heads(of_key, groups), sum_heads(of_value, groups)};
}

// Which kernel CUDA takes: sdp_utils.cpp, select_sdp_backend, on a GPU of compute capability 8.0 or newer. A compiler asks
// with symbols for sizes.
static int64_t choose(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                      double dropout, bool is_causal, Scale, bool enable_gqa) {
  const auto& context = at::globalContext();
  const bool is_dense = query.dim() == 4 && key.dim() == 4 && value.dim() == 4 && query.sym_numel() != 0 && key.sym_numel() != 0;
  const bool has_rows = query.sym_stride(-1) == 1 && key.sym_stride(-1) == 1 && value.sym_stride(-1) == 1;
  const bool has_mask = mask && mask->defined();
  const bool is_half = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  if (!is_dense || !has_rows || dropout > 0.0) return static_cast<int64_t>(at::SDPBackend::math);
  const bool is_grouped = query.sym_size(1) != key.sym_size(1);
  const bool is_square = query.sym_size(2) == key.sym_size(2);
  const auto width = query.sym_size(3);
  if (context.userEnabledFlashSDP() && is_half && !has_mask && width <= 256 && width == value.sym_size(3) &&
      (!is_causal || is_square) && (!is_grouped || enable_gqa)) {
    return static_cast<int64_t>(at::SDPBackend::flash_attention);
  }
  if (context.userEnabledMemEfficientSDP() && (is_half || query.scalar_type() == at::kFloat) && !is_grouped &&
      !(has_mask && mask->requires_grad())) {
    return static_cast<int64_t>(at::SDPBackend::efficient_attention);
  }
  return static_cast<int64_t>(at::SDPBackend::math);
}

// Flash attention on rows of equal length.

using FlashOutput = std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;

static FlashOutput flash(const Tensor& query, const Tensor& key, const Tensor& value, double dropout, bool is_causal,
                         bool, Scale scale) {
  TORCH_CHECK(dropout == 0.0, "dropout inside attention is not simulated");
  auto result = at::empty_like(query.transpose(1, 2), at::MemoryFormat::Contiguous).transpose(1, 2);
  auto sums = at::empty({query.size(0), query.size(1), query.size(2)}, query.options().dtype(at::kFloat));
  auto [out, log_sums] = compute(host(query), host(key), host(value), is_causal, {}, scale);
  host(result).copy_(out);
  host(sums).copy_(log_sums);
  auto random = at::empty({2}, query.options().dtype(at::kLong)), none = at::empty({0}, query.options());
  ran("flash attention forward", {query, key, value}, {result, sums});
  return {result, sums, Tensor(), Tensor(), query.size(2), key.size(2), random, random, none};
}

// What mha_bwd holds beside its results: the gradient of the queries in float32, a sum for each row, and of grouped
// keys and values a gradient for each head of the queries. Rows are rounded up to blocks of 128, heads to 32 (64).
static std::vector<Tensor> temporaries(const Tensor& query, int64_t rows, int64_t heads, int64_t groups,
                                       int64_t key_rows) {
  const int64_t size = query.size(-1), block = size <= 128 ? 32 : 64;
  auto rounded = (size + block - 1) / block * block;
  auto single = query.options().dtype(at::kFloat);
  std::vector<Tensor> held{at::empty({rows, heads, rounded}, single), at::empty({heads, rows}, single)};
  for (int i = 0; i < 2 && groups != heads; i++) held.push_back(at::empty({key_rows, heads, size}, query.options()));
  return held;
}

static std::tuple<Tensor, Tensor, Tensor> flash_backward(const Tensor& gradient, const Tensor& query,
                                                         const Tensor& key, const Tensor& value, const Tensor& out,
                                                         const Tensor& sums, const Tensor&, const Tensor&, int64_t,
                                                         int64_t, double, bool is_causal, const Tensor&, const Tensor&,
                                                         Scale scale) {
  TORCH_CHECK(gradient.scalar_type() == query.scalar_type(), "query and dout must have the same dtype");
  auto like = [](const Tensor& x) { return at::empty_like(x.transpose(1, 2), at::MemoryFormat::Contiguous).transpose(1, 2); };
  auto dense = gradient.transpose(1, 2).contiguous().transpose(1, 2);
  std::array<Tensor, 3> results{like(query), like(key), like(value)};
  auto rows = query.size(0) * ((query.size(2) + 127) / 128 * 128);
  auto held = temporaries(query, rows, query.size(1), key.size(1), key.size(0) * key.size(2));
  auto found = compute_backward(host(dense), host(query), host(key), host(value), host(out), host(sums), is_causal, {},
                                scale);
  host(results[0]).copy_(std::get<0>(found));
  host(results[1]).copy_(std::get<1>(found));
  host(results[2]).copy_(std::get<2>(found));
  ran("flash attention backward", {gradient, query, key, value, out, sums}, {results[0], results[1], results[2]});
  return {results[0], results[1], results[2]};
}

// Flash attention on samples of any length, end to end in one row: (T, H, D).

static std::vector<int64_t> check_ragged(const Tensor& query, const Tensor& key, const Tensor& value,
                                         const Tensor& offsets, const Tensor& key_offsets, int64_t longest,
                                         int64_t longest_key) {
  for (const auto& tensor : {query, key, value}) {
    TORCH_CHECK(tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16,
                "FlashAttention only support fp16 and bf16 data type (simulated), not ", tensor.scalar_type());
    TORCH_CHECK(tensor.scalar_type() == query.scalar_type(), "query, key and value must have the same dtype");
    TORCH_CHECK(tensor.stride(-1) == 1, "Input tensor must have contiguous last dimension");
    TORCH_CHECK(tensor.dim() == 3, "samples end to end are (tokens, heads, head size)");
  }
  for (const auto& tensor : {offsets, key_offsets}) {
    TORCH_CHECK(tensor.scalar_type() == at::kInt && tensor.device() == query.device() && tensor.is_contiguous(),
                "cu_seqlens must have dtype int32, lie on ", query.device(), " and be contiguous; it is ",
                tensor.scalar_type(), " on ", tensor.device(), " (simulated)");
  }
  TORCH_CHECK(query.size(-1) <= 256 && query.size(-1) % 8 == 0,
              "FlashAttention only supports head sizes that are multiples of 8 and at most 256");
  TORCH_CHECK(query.size(1) % key.size(1) == 0, "Number of heads in key/value must divide number of heads in query");
  auto lengths = host(offsets).diff().to(at::kLong).contiguous();
  std::vector<int64_t> found(lengths.data_ptr<int64_t>(), lengths.data_ptr<int64_t>() + lengths.numel());
  // The real kernel does not look: it would read beyond the last token, or leave rows out.
  TORCH_CHECK(lengths.sum().item<int64_t>() == query.size(0), "the offsets do not end at the last token (simulated)");
  TORCH_CHECK(lengths.max().item<int64_t>() <= longest && longest == longest_key,
              "max_q is less than the longest sample (simulated)");
  return found;
}

static bool causal_of(bool is_causal, std::optional<int64_t> left, std::optional<int64_t> right) {
  TORCH_CHECK(left.value_or(-1) == -1 && (right.value_or(-1) == -1 || *right == 0), "a window is not simulated");
  return is_causal || right.value_or(-1) == 0;
}

static Tensor sample(const Tensor& tensor, int64_t begin, int64_t length) {  // (T, H, D) -> (1, H, length, D)
  return tensor.narrow(0, begin, length).transpose(0, 1).unsqueeze(0);
}

static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> ragged(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& offsets,
    const std::optional<Tensor>& key_offsets, int64_t longest, int64_t longest_key, double, bool is_causal, bool,
    Scale scale, std::optional<int64_t> left, std::optional<int64_t> right, const std::optional<Tensor>&,
    const std::optional<Tensor>&, const std::optional<Tensor>&, std::optional<int64_t>) {
  TORCH_CHECK(offsets && key_offsets, "without offsets this kernel is not simulated");
  auto lengths = check_ragged(query, key, value, *offsets, *key_offsets, longest, longest_key);
  auto result = at::empty(query.sizes(), query.options());
  auto sums = at::empty({query.size(1), query.size(0)}, query.options().dtype(at::kFloat));
  int64_t begin = 0;
  for (auto length : lengths) {
    if (length == 0) continue;
    auto part = [&](const Tensor& x) { return sample(host(x), begin, length); };
    auto [out, log_sums] = compute(part(query), part(key), part(value), causal_of(is_causal, left, right), {}, scale);
    part(result).copy_(out);
    host(sums).narrow(1, begin, length).copy_(log_sums.squeeze(0));
    begin += length;
  }
  auto random = at::empty({2}, query.options().dtype(at::kLong));
  ran("flash attention forward", {query, key, value, *offsets}, {result, sums});
  return {result, sums, random, at::empty({}, query.options().dtype(at::kLong)), at::empty({0}, query.options())};
}

static std::tuple<Tensor, Tensor, Tensor> ragged_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& out,
    const Tensor& sums, const Tensor& offsets, const Tensor& key_offsets, int64_t longest, int64_t longest_key, double,
    bool is_causal, const Tensor&, const Tensor&, Scale scale, std::optional<int64_t> left,
    std::optional<int64_t> right) {
  auto lengths = check_ragged(query, key, value, offsets, key_offsets, longest, longest_key);
  TORCH_CHECK(gradient.scalar_type() == query.scalar_type(), "query and dout must have the same dtype");
  auto dense = gradient.contiguous();
  std::array<Tensor, 3> results{at::empty(query.sizes(), query.options()), at::empty(key.sizes(), key.options()),
                                at::empty(value.sizes(), value.options())};
  auto rows = query.size(0) + 128 * static_cast<int64_t>(lengths.size());
  auto held = temporaries(query, rows, query.size(1), key.size(1), key.size(0));
  int64_t begin = 0;
  for (auto length : lengths) {
    if (length == 0) continue;
    auto part = [&](const Tensor& x) { return sample(host(x), begin, length); };
    auto found = compute_backward(part(dense), part(query), part(key), part(value), part(out),
                                  host(sums).narrow(1, begin, length).unsqueeze(0),
                                  causal_of(is_causal, left, right), {}, scale);
    part(results[0]).copy_(std::get<0>(found));
    part(results[1]).copy_(std::get<1>(found));
    part(results[2]).copy_(std::get<2>(found));
    begin += length;
  }
  ran("flash attention backward", {gradient, query, key, value, out, sums, offsets}, {results[0], results[1], results[2]});
  return {results[0], results[1], results[2]};
}

// Memory-efficient attention: float32 too, and masks; no grouped heads.

static std::tuple<Tensor, Tensor, Tensor, Tensor> efficient(const Tensor& query, const Tensor& key, const Tensor& value,
                                                            const std::optional<Tensor>& bias, bool needs_sums,
                                                            double dropout, bool is_causal, Scale scale) {
  TORCH_CHECK(dropout == 0.0, "dropout inside attention is not simulated");
  auto result = at::empty_like(query.transpose(1, 2), at::MemoryFormat::Contiguous).transpose(1, 2);
  auto rows = needs_sums ? (query.size(2) + 31) / 32 * 32 : 0;
  auto sums = at::empty({query.size(0), query.size(1), rows}, query.options().dtype(at::kFloat));
  auto on_host = bias && bias->defined() ? std::optional<Tensor>(host(*bias)) : std::nullopt;
  auto [out, log_sums] = compute(host(query), host(key), host(value), is_causal, on_host, scale);
  host(result).copy_(out);
  if (needs_sums) host(sums).narrow(2, 0, query.size(2)).copy_(log_sums);
  auto random = at::empty({}, query.options().dtype(at::kLong));
  ran("memory-efficient attention forward", {query, key, value}, {result, sums});
  return {result, sums, random, random};
}

static std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias,
    const Tensor& out, const Tensor& sums, const Tensor&, const Tensor&, double, std::array<bool, 4>, bool is_causal,
    Scale scale) {
  auto like = [](const Tensor& x) { return at::empty_like(x.transpose(1, 2), at::MemoryFormat::Contiguous).transpose(1, 2); };
  auto delta = at::empty({query.size(0), query.size(1), query.size(2)}, query.options().dtype(at::kFloat));
  std::array<Tensor, 3> results{like(query), like(key), like(value)};
  auto on_host = bias.defined() ? std::optional<Tensor>(host(bias)) : std::nullopt;
  auto found = compute_backward(host(gradient), host(query), host(key), host(value), host(out),
                                host(sums).narrow(2, 0, query.size(2)), is_causal, on_host, scale);
  host(results[0]).copy_(std::get<0>(found));
  host(results[1]).copy_(std::get<1>(found));
  host(results[2]).copy_(std::get<2>(found));
  ran("memory-efficient attention backward", {gradient, query, key, value, out, sums}, {results[0], results[1], results[2]});
  return {results[0], results[1], results[2], Tensor()};
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("_fused_sdp_choice", &choose);
  m.impl("_scaled_dot_product_flash_attention", &flash);
  m.impl("_scaled_dot_product_flash_attention_backward", &flash_backward);
  m.impl("_flash_attention_forward", &ragged);
  m.impl("_flash_attention_backward", &ragged_backward);
  m.impl("_scaled_dot_product_efficient_attention", &efficient);
  m.impl("_scaled_dot_product_efficient_attention_backward", &efficient_backward);
}

}  // namespace simulated

namespace at::native {
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &simulated::choose)
}
