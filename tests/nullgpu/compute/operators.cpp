// Right values: every CUDA operator runs as before (its kernels do nothing, its allocations are the real ones), and the CPU's operator of the
// same name runs on the same memory and fills in the results. Only aten's; NCCL's stub moves real bytes by itself.
#include "random.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <dlfcn.h>
#include <torch/library.h>

#include <c10/util/Logging.h>

#include <cstdio>
#include <mutex>
#include <set>
#include <unordered_map>

using at::IValue;
using at::Tensor;
using c10::DispatchKey;
using c10::OperatorHandle;
using torch::jit::Stack;

namespace {

enum class Way { SHADOW, ORIGINAL, CPU_ONLY, CUSTOM, DRAWN };
thread_local int depth = 0;
bool tracing = std::getenv("NULLGPU_TRACE") != nullptr;
using Custom = std::vector<IValue> (*)(const std::vector<IValue>& arguments, const std::vector<IValue>& outputs, uint64_t seed);

void drain(void* stream) {
  static auto wait = reinterpret_cast<void (*)(void*)>(dlsym(RTLD_DEFAULT, "ng_drain"));
  static auto capturing = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "ng_capturing"));
  (void)capturing;
  if (wait) wait(stream);
}

struct Below { // what a kernel below autograd, autocast and Python's modes sees
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard others{c10::autocast_dispatch_keyset | c10::DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::Functionalize})};
};

std::string full_name(const OperatorHandle& op) { return c10::toString(op.operator_name()); }

// NULLGPU_COMPUTE_BYTES: operators on more than that are left out. What decides the control flow (masks, counts, norms) is small.
const int64_t limit = std::getenv("NULLGPU_COMPUTE_BYTES") ? std::atoll(std::getenv("NULLGPU_COMPUTE_BYTES")) : INT64_MAX;

// Where all is computed, a result that isn't must not be taken for a GPU's: an error. Elsewhere values don't matter.
void complain(const OperatorHandle& op, const std::string& what) {
  std::string name = full_name(op);
  if (limit == INT64_MAX) throw c10::NotImplementedError({__func__, __FILE__, uint32_t(__LINE__)}, "not on the stub GPU: " + name + " " + what);
  static std::set<std::string> told; // once for each operator
  static std::mutex lock;
  std::lock_guard<std::mutex> guard(lock);
  if (tracing && told.insert(name).second) std::fprintf(stderr, "nullgpu: %s %.160s\n", name.c_str(), what.c_str());
}

bool on_gpu(const Tensor& t) { return t.defined() && t.is_cuda() && t.layout() == at::kStrided && !t.is_nested(); }

// The same memory as a CPU tensor.
Tensor same_memory(const Tensor& t) {
  if (!on_gpu(t)) return t;
  Tensor made;
  if (t.numel() == 0 || t.storage().data() == nullptr) {
    made = at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kCPU));
  } else {
    made = at::from_blob(t.mutable_data_ptr(), t.sizes(), t.strides(), [](void*) {}, t.options().device(at::kCPU).pinned_memory(false).requires_grad(false));
  }
  if (t.is_conj()) made._set_conj(true);
  if (t.is_neg()) made._set_neg(true);
  return made;
}

c10::Device cpu(at::kCPU);

IValue map_tensors(const IValue& value, const std::function<Tensor(const Tensor&)>& f) {
  if (value.isTensor()) return IValue(f(value.toTensor()));
  if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const Tensor& t : value.toTensorVector()) made.push_back(f(t));
    return IValue(made);
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (const auto& item : value.toOptionalTensorVector()) made.push_back(item ? std::optional<Tensor>(f(*item)) : std::nullopt);
    return IValue(made);
  }
  if (value.isList() && value.toList().elementType()->kind() == c10::TypeKind::OptionalType) {
    c10::List<std::optional<Tensor>> made;
    for (const IValue& item : value.toListRef()) made.push_back(item.isNone() ? std::nullopt : std::optional<Tensor>(f(item.toTensor())));
    return IValue(made);
  }
  if (value.isDevice() && value.toDevice().is_cuda()) return IValue(cpu);
  return value;
}

void each_tensor(const IValue& value, const std::function<void(const Tensor&)>& f) {
  if (value.isTensor()) f(value.toTensor());
  else if (value.isTensorList()) for (const Tensor& t : value.toTensorVector()) f(t);
  else if (value.isList()) for (const IValue& item : value.toListRef()) { if (item.isTensor()) f(item.toTensor()); }
}

void fill(const Tensor& to, const Tensor& from, const OperatorHandle& op) {
  if (!to.defined() || !from.defined()) return;
  Tensor target = same_memory(to);
  if (target.sizes() == from.sizes()) target.copy_(from);
  else if (target.numel() == from.numel()) target.copy_(from.reshape(target.sizes()));
  else if (target.numel() && from.numel()) complain(op, "gave other sizes on the CPU");
}
void fill(const IValue& to, const IValue& from, const OperatorHandle& op) {
  if (to.isTensor() && from.isTensor()) fill(to.toTensor(), from.toTensor(), op);
  else if (to.isTensorList() && from.isTensorList()) {
    auto a = to.toTensorVector(), b = from.toTensorVector();
    for (size_t i = 0; i < a.size() && i < b.size(); i++) fill(a[i], b[i], op);
  }
}

// -- operators that the CPU doesn't have under that name ----------------------------------------------------------------------------
Tensor causal(int64_t rows, int64_t columns) { return at::ones({rows, columns}, at::kBool).tril(); }
Tensor scores(const Tensor& q, const Tensor& k, const std::optional<Tensor>& bias, bool is_causal, double scale) {
  Tensor s = at::matmul(q, k.transpose(-2, -1)) * scale;
  if (bias && bias->defined()) s = s + bias->to(at::kFloat);
  if (is_causal) s = s.masked_fill(causal(q.size(-2), k.size(-2)).logical_not(), -std::numeric_limits<double>::infinity());
  return s;
}
std::vector<int64_t> weights_of(const Tensor& q, const Tensor& k) { return {q.size(0), q.size(1), q.size(2), k.size(2)}; }
// Dropout's mask, already divided; none where nothing is dropped. Not a GPU's: the order of flash attention's draws is that of its tiles.
Tensor kept(const Tensor& q, const Tensor& k, double p, uint64_t seed) {
  if (p == 0) return {};
  return at::empty(weights_of(q, k), at::kFloat).bernoulli_(1 - p, at::detail::createCPUGenerator(seed)) / (1 - p);
}
Tensor widened(const Tensor& kv, int64_t heads) { return kv.size(1) == heads ? kv : kv.repeat_interleave(heads / kv.size(1), 1); }
struct Forward { Tensor out, lse; };
Forward attend(const Tensor& q_, const Tensor& k_, const Tensor& v_, const std::optional<Tensor>& bias, const Tensor& mask, bool is_causal, std::optional<double> scale) {
  Tensor q = q_.to(at::kFloat), k = widened(k_.to(at::kFloat), q_.size(1)), v = widened(v_.to(at::kFloat), q_.size(1));
  Tensor s = scores(q, k, bias, is_causal, scale.value_or(1 / std::sqrt(double(q.size(-1)))));
  Tensor lse = s.logsumexp(-1), weights = (s - lse.unsqueeze(-1)).exp();
  if (mask.defined()) weights = weights * mask;
  return {at::matmul(weights, v), lse};
}
struct Backward { Tensor q, k, v, bias; };
Backward attend_backward(const Tensor& g_, const Tensor& q_, const Tensor& k_, const Tensor& v_, const std::optional<Tensor>& bias, const Tensor& mask, bool is_causal, std::optional<double> scale) {
  int64_t heads = q_.size(1);
  Tensor g = g_.to(at::kFloat), q = q_.to(at::kFloat), k = widened(k_.to(at::kFloat), heads), v = widened(v_.to(at::kFloat), heads);
  double by = scale.value_or(1 / std::sqrt(double(q.size(-1))));
  Tensor weights = scores(q, k, bias, is_causal, by).softmax(-1);
  Tensor dropped = mask.defined() ? weights * mask : weights;
  Tensor gv = at::matmul(dropped.transpose(-2, -1), g), gw = at::matmul(g, v.transpose(-2, -1));
  if (mask.defined()) gw = gw * mask;
  Tensor gs = weights * (gw - (gw * weights).sum(-1, true));
  Tensor gq = at::matmul(gs, k) * by, gk = at::matmul(gs.transpose(-2, -1), q) * by;
  auto narrowed = [&](const Tensor& t, int64_t n) { return n == heads ? t : t.view({t.size(0), n, heads / n, t.size(2), t.size(3)}).sum(2); };
  Tensor gb;
  if (bias && bias->defined()) gb = gs.sum_to_size(bias->sizes());
  return {gq, narrowed(gk, k_.size(1)), narrowed(gv, v_.size(1)), gb};
}
std::optional<Tensor> maybe(const IValue& v) { return v.isTensor() && v.toTensor().defined() ? std::optional<Tensor>(v.toTensor()) : std::nullopt; }
std::optional<double> number(const IValue& v) { return v.isNone() ? std::nullopt : std::optional<double>(v.toDouble()); }
// The seed of dropout travels in the tensor that holds CUDA's.
IValue as_seed(const IValue& out, uint64_t seed) {
  if (!out.isTensor() || !out.toTensor().defined() || out.toTensor().numel() == 0) return out;
  return at::full(out.toTensor().sizes(), int64_t(seed >> 1), out.toTensor().options().device(at::kCPU).dtype(at::kLong)).to(out.toTensor().scalar_type());
}
uint64_t seed_of(const IValue& v) { return v.isTensor() && v.toTensor().defined() && v.toTensor().numel() ? uint64_t(v.toTensor().to(at::kLong).flatten()[0].item<int64_t>()) : 0; }
uint64_t halved(uint64_t seed) { return seed >> 1; }
// The same as a GPU draws it, from the seed and offset that CUDA's implementation kept.
Tensor drawn(const Tensor& q, const Tensor& k, double p, const IValue& seed, const IValue& offset) {
  return p == 0 ? Tensor() : gpu_random::attention_mask(weights_of(q, k), p, seed_of(seed), seed_of(offset));
}
Tensor lse_like(const IValue& out, const Tensor& lse) { // the GPU's may be longer: padded
  if (!out.isTensor() || !out.toTensor().defined() || out.toTensor().numel() == 0) return Tensor();
  Tensor like = out.toTensor();
  if (like.numel() == lse.numel()) return lse.reshape(like.sizes());
  Tensor padded = at::zeros(like.sizes(), at::kFloat);
  padded.slice(2, 0, lse.size(2)).copy_(lse);
  return padded;
}
using Args = const std::vector<IValue>&;
// (query, key, value, dropout_p, is_causal, return_debug_mask, scale) -> (output, logsumexp, _, _, _, _, rng_state, unused, _)
std::vector<IValue> flash(Args a, Args out, uint64_t seed) {
  auto r = attend(a[0].toTensor(), a[1].toTensor(), a[2].toTensor(), std::nullopt, kept(a[0].toTensor(), a[1].toTensor(), a[3].toDouble(), halved(seed)), a[4].toBool(), number(a[6]));
  return {r.out, lse_like(out[1], r.lse), out[2], out[3], out[4], out[5], as_seed(out[6], seed), out[7], out[8]};
}
// (grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset, scale)
std::vector<IValue> flash_backward(Args a, Args out, uint64_t) {
  auto r = attend_backward(a[0].toTensor(), a[1].toTensor(), a[2].toTensor(), a[3].toTensor(), std::nullopt, kept(a[1].toTensor(), a[2].toTensor(), a[10].toDouble(), seed_of(a[12])), a[11].toBool(), number(a[14]));
  return {r.q, r.k, r.v};
}
// (query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, scale) -> (output, log_sumexp, philox_seed, philox_offset)
std::vector<IValue> efficient(Args a, Args out, uint64_t) {
  auto r = attend(a[0].toTensor(), a[1].toTensor(), a[2].toTensor(), maybe(a[3]), drawn(a[0].toTensor(), a[1].toTensor(), a[5].toDouble(), out[2], out[3]), a[6].toBool(), number(a[7]));
  return {r.out, lse_like(out[1], r.lse), out[2], out[3]};
}
// (grad_out, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset, dropout_p, grad_input_mask, is_causal, scale)
std::vector<IValue> efficient_backward(Args a, Args out, uint64_t) {
  auto r = attend_backward(a[0].toTensor(), a[1].toTensor(), a[2].toTensor(), a[3].toTensor(), maybe(a[4]), drawn(a[1].toTensor(), a[2].toTensor(), a[9].toDouble(), a[7], a[8]), a[11].toBool(), number(a[12]));
  return {r.q, r.k, r.v, r.bias};
}
// (query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, return_debug_mask, scale) -> (output, logsumexp, _, _, _, _, seed, offset, _)
std::vector<IValue> cudnn_attention(Args a, Args out, uint64_t seed) {
  auto r = attend(a[0].toTensor(), a[1].toTensor(), a[2].toTensor(), maybe(a[3]), kept(a[0].toTensor(), a[1].toTensor(), a[5].toDouble(), halved(seed)), a[6].toBool(), number(a[8]));
  return {r.out, lse_like(out[1], r.lse), out[2], out[3], out[4], out[5], as_seed(out[6], seed), out[7], out[8]};
}
// (grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, scale)
std::vector<IValue> cudnn_attention_backward(Args a, Args out, uint64_t) {
  auto r = attend_backward(a[0].toTensor(), a[1].toTensor(), a[2].toTensor(), a[3].toTensor(), maybe(a[8]), kept(a[1].toTensor(), a[2].toTensor(), a[13].toDouble(), seed_of(a[6])), a[14].toBool(), number(a[15]));
  return {r.q, r.k, r.v};
}
// (self, weight, padding, stride, dilation, groups, ...)
std::vector<IValue> convolution(Args a, Args, uint64_t) {
  return {at::convolution(a[0].toTensor(), a[1].toTensor(), {}, a[3].toIntVector(), a[2].toIntVector(), a[4].toIntVector(), false, at::IntArrayRef(std::vector<int64_t>(a[2].toIntVector().size(), 0)), a[5].toInt())};
}
// (self, weight, padding, output_padding, stride, dilation, groups, ...)
std::vector<IValue> convolution_transpose(Args a, Args, uint64_t) {
  return {at::convolution(a[0].toTensor(), a[1].toTensor(), {}, a[4].toIntVector(), a[2].toIntVector(), a[5].toIntVector(), true, a[3].toIntVector(), a[6].toInt())};
}
// (self, weight, kernel_size, bias, stride, padding, dilation)
std::vector<IValue> depthwise(Args a, Args, uint64_t) {
  std::vector<int64_t> none(a[5].toIntVector().size(), 0);
  return {at::convolution(a[0].toTensor(), a[1].toTensor(), maybe(a[3]), a[4].toIntVector(), a[5].toIntVector(), a[6].toIntVector(), false, none, a[0].toTensor().size(1))};
}
// (input, weight, bias, running_mean, running_var, training, momentum, epsilon) -> (out, save_mean, save_var, reserve)
std::vector<IValue> cudnn_batch_norm(Args a, Args out, uint64_t) {
  auto r = at::native_batch_norm(a[0].toTensor(), maybe(a[1]), maybe(a[2]), maybe(a[3]), maybe(a[4]), a[5].toBool(), a[6].toDouble(), a[7].toDouble());
  return {std::get<0>(r), std::get<1>(r), std::get<2>(r), out[3]};
}
// (input, grad_output, weight, running_mean, running_var, save_mean, save_var, epsilon, reserve)
std::vector<IValue> cudnn_batch_norm_backward(Args a, Args, uint64_t) {
  auto r = at::native_batch_norm_backward(a[1].toTensor(), a[0].toTensor(), maybe(a[2]), maybe(a[3]), maybe(a[4]), maybe(a[5]), maybe(a[6]), true, a[7].toDouble(), {true, true, true});
  return {std::get<0>(r), std::get<1>(r), std::get<2>(r)};
}
Tensor channels(const Tensor& t, const Tensor& like) { std::vector<int64_t> s(like.dim(), 1); s[1] = -1; return t.to(at::kDouble).view(s); }
std::vector<int64_t> but_channels(const Tensor& t) { std::vector<int64_t> dims; for (int64_t d = 0; d < t.dim(); d++) if (d != 1) dims.push_back(d); return dims; }
// Batch norm over all ranks, in double: a variance is a difference of squares here, where the kernels go by Welford. (input, eps) -> (mean, invstd)
std::vector<IValue> batch_norm_stats(Args a, Args, uint64_t) {
  Tensor x = a[0].toTensor().to(at::kDouble);
  auto dims = but_channels(x);
  return {x.mean(dims), (x.var(dims, false) + a[1].toDouble()).rsqrt()};
}
// (input, mean, invstd, running_mean, running_var, momentum, eps, counts) -> (mean, invstd)
std::vector<IValue> batch_norm_gather(Args a, Args, uint64_t) {
  Tensor mean = a[1].toTensor().to(at::kDouble), invstd = a[2].toTensor().to(at::kDouble), counts = a[7].toTensor().to(at::kDouble).view({-1, 1});
  double eps = a[6].toDouble();
  Tensor n = counts.sum(), var = invstd.pow(-2) - eps, m = (mean * counts).sum(0) / n;
  Tensor v = ((var + mean.square()) * counts).sum(0) / n - m.square();
  if (auto running = maybe(a[3])) running->mul_(1 - a[5].toDouble()).add_(m, a[5].toDouble());
  if (auto running = maybe(a[4])) running->mul_(1 - a[5].toDouble()).add_(v * (n / (n - 1)), a[5].toDouble());
  return {m, (v + eps).rsqrt()};
}
// (input, weight, bias, mean, invstd, eps)
std::vector<IValue> batch_norm_elemt(Args a, Args, uint64_t) {
  Tensor x = a[0].toTensor().to(at::kDouble), y = (x - channels(a[3].toTensor(), x)) * channels(a[4].toTensor(), x);
  if (auto w = maybe(a[1])) y = y * channels(*w, x);
  if (auto b = maybe(a[2])) y = y + channels(*b, x);
  return {y};
}
// (grad_out, input, mean, invstd, weight, input_g, weight_g, bias_g) -> (sum_dy, sum_dy_xmu, grad_weight, grad_bias)
std::vector<IValue> batch_norm_backward_reduce(Args a, Args, uint64_t) {
  Tensor g = a[0].toTensor().to(at::kDouble), x = a[1].toTensor().to(at::kDouble);
  auto dims = but_channels(x);
  Tensor sum = g.sum(dims), xmu = (g * (x - channels(a[2].toTensor(), x))).sum(dims);
  return {sum, xmu, xmu * a[3].toTensor().to(at::kDouble), sum};
}
// (grad_out, input, mean, invstd, weight, sum_dy, sum_dy_xmu, count)
std::vector<IValue> batch_norm_backward_elemt(Args a, Args, uint64_t) {
  Tensor g = a[0].toTensor().to(at::kDouble), x = a[1].toTensor().to(at::kDouble), invstd = channels(a[3].toTensor(), x);
  Tensor n = a[7].toTensor().to(at::kDouble).sum();
  Tensor r = (g - channels(a[5].toTensor(), x) / n - (x - channels(a[2].toTensor(), x)) * invstd.square() * channels(a[6].toTensor(), x) / n) * invstd;
  if (auto w = maybe(a[4])) r = r * channels(*w, x);
  return {r};
}
std::vector<IValue> masked_scale(Args a, Args, uint64_t) { return {a[0].toTensor() * a[1].toTensor() * a[2].toDouble()}; }

// (input, normalized_shape, weight, eps) -> (out, rstd)
std::vector<IValue> rms_norm(Args a, Args out, uint64_t) {
  Tensor x = a[0].toTensor().to(at::kFloat);
  std::vector<int64_t> dims;
  for (size_t d = 0; d < a[1].toIntVector().size(); d++) dims.push_back(-1 - int64_t(d));
  double eps = a[3].isNone() ? (a[0].toTensor().scalar_type() == at::kDouble ? 2.220446049250313e-16 : 1.1920928955078125e-07) : a[3].toDouble();
  Tensor rstd = (x.square().mean(dims, true) + eps).rsqrt(), y = x * rstd;
  if (auto w = maybe(a[2])) y = y * *w;
  return {y, rstd};
}
// (grad_out, input, normalized_shape, rstd, weight, output_mask) -> (grad_input, grad_weight)
std::vector<IValue> rms_norm_backward(Args a, Args out, uint64_t) {
  Tensor g = a[0].toTensor().to(at::kFloat), x = a[1].toTensor().to(at::kFloat), rstd = a[3].toTensor().to(at::kFloat), n = x * rstd, gw = g;
  std::vector<int64_t> dims, others;
  int64_t last = int64_t(a[2].toIntVector().size());
  for (int64_t d = 0; d < last; d++) dims.push_back(-1 - d);
  for (int64_t d = 0; d < x.dim() - last; d++) others.push_back(d);
  if (auto w = maybe(a[4])) gw = g * *w;
  Tensor gx = (gw - n * (gw * n).mean(dims, true)) * rstd;
  return {gx, others.empty() ? g * n : (g * n).sum(others)};
}
// (input_gates, hidden_gates, cx, input_bias, hidden_bias) -> (hy, cy, workspace)
std::vector<IValue> lstm_cell(Args a, Args, uint64_t) {
  Tensor gates = a[0].toTensor() + a[1].toTensor();
  if (auto b = maybe(a[3])) gates = gates + *b;
  if (auto b = maybe(a[4])) gates = gates + *b;
  auto g = gates.chunk(4, 1);
  Tensor i = g[0].sigmoid(), f = g[1].sigmoid(), c = g[2].tanh(), o = g[3].sigmoid(), cy = f * a[2].toTensor() + i * c;
  return {o * cy.tanh(), cy, at::cat({i, f, c, o}, 1)};
}
// (grad_hy, grad_cy, cx, cy, workspace, has_bias) -> (grad_gates, grad_cx, grad_bias)
std::vector<IValue> lstm_cell_backward(Args a, Args, uint64_t) {
  Tensor cx = a[2].toTensor(), cy = a[3].toTensor();
  auto w = a[4].toTensor().chunk(4, 1);
  Tensor gh = maybe(a[0]).value_or(at::zeros_like(cy)), gc = maybe(a[1]).value_or(at::zeros_like(cy)), t = cy.tanh();
  gc = gc + gh * w[3] * (1 - t * t);
  Tensor gates = at::cat({gc * w[2] * w[0] * (1 - w[0]), gc * cx * w[1] * (1 - w[1]), gc * w[0] * (1 - w[2] * w[2]), gh * t * w[3] * (1 - w[3])}, 1);
  return {gates, gc * w[1], a[5].toBool() ? gates.sum(0) : Tensor()};
}
// (input_gates, hidden_gates, hx, input_bias, hidden_bias) -> (hy, workspace)
std::vector<IValue> gru_cell(Args a, Args, uint64_t) {
  Tensor x = a[0].toTensor(), h = a[1].toTensor(), hx = a[2].toTensor();
  if (auto b = maybe(a[3])) x = x + *b;
  if (auto b = maybe(a[4])) h = h + *b;
  auto i = x.chunk(3, 1), g = h.chunk(3, 1);
  Tensor r = (i[0] + g[0]).sigmoid(), z = (i[1] + g[1]).sigmoid(), n = (i[2] + r * g[2]).tanh();
  return {n + z * (hx - n), at::cat({r, z, n, hx, g[2]}, 1)};
}
// (grad_hy, workspace, has_bias) -> (grad_input_gates, grad_hidden_gates, grad_hx, grad_input_bias, grad_hidden_bias)
std::vector<IValue> gru_cell_backward(Args a, Args, uint64_t) {
  Tensor g = a[0].toTensor();
  auto w = a[1].toTensor().chunk(5, 1);
  Tensor r = w[0], z = w[1], n = w[2], hx = w[3], hn = w[4];
  Tensor gn = g * (1 - z) * (1 - n * n), gz = g * (hx - n) * z * (1 - z), gr = gn * hn * r * (1 - r);
  Tensor gi = at::cat({gr, gz, gn}, 1), gh = at::cat({gr, gz, gn * r}, 1);
  bool bias = a[2].toBool();
  return {gi, gh, g * z, bias ? gi.sum(0) : Tensor(), bias ? gh.sum(0) : Tensor()};
}

const std::unordered_map<std::string, Custom> customs = {
    {"aten::_fused_rms_norm", rms_norm},
    {"aten::_fused_rms_norm_backward", rms_norm_backward},
    {"aten::_thnn_fused_lstm_cell", lstm_cell},
    {"aten::_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward},
    {"aten::_thnn_fused_gru_cell", gru_cell},
    {"aten::_thnn_fused_gru_cell_backward", gru_cell_backward},
    {"aten::_scaled_dot_product_flash_attention", flash},
    {"aten::_scaled_dot_product_flash_attention_backward", flash_backward},
    {"aten::_scaled_dot_product_efficient_attention", efficient},
    {"aten::_scaled_dot_product_efficient_attention_backward", efficient_backward},
    {"aten::_scaled_dot_product_cudnn_attention", cudnn_attention},
    {"aten::_scaled_dot_product_cudnn_attention_backward", cudnn_attention_backward},
    {"aten::cudnn_convolution", convolution},
    {"aten::cudnn_convolution_transpose", convolution_transpose},
    {"aten::_conv_depthwise2d", depthwise},
    {"aten::conv_depthwise3d", depthwise},
    {"aten::cudnn_batch_norm", cudnn_batch_norm},
    {"aten::cudnn_batch_norm_backward", cudnn_batch_norm_backward},
    {"aten::batch_norm_stats", batch_norm_stats},
    {"aten::batch_norm_gather_stats_with_counts", batch_norm_gather},
    {"aten::batch_norm_elemt", batch_norm_elemt},
    {"aten::batch_norm_backward_reduce", batch_norm_backward_reduce},
    {"aten::batch_norm_backward_elemt", batch_norm_backward_elemt},
    {"aten::_masked_scale", masked_scale},
};
// Only the shape, the storage or a decision: what CUDA's own kernel does is all there is to do.
const std::set<std::string> originals = {
    "aten::_fused_sdp_choice", "aten::is_pinned", "aten::_pin_memory", "aten::record_stream", "aten::_local_scalar_dense", "aten::empty.memory_format",
    "aten::empty_strided", "aten::resize_", "aten::set_.source_Storage", "aten::set_.source_Storage_storage_offset", "aten::set_.source_Tensor", "aten::set_",
    "aten::set_.source_Tensor_storage_offset", "aten::_cudnn_init_dropout_state", "aten::_cudnn_rnn_flatten_weight", "aten::is_set_to", "aten::_assert_async",
    "aten::_assert_async.msg", "aten::_use_cudnn_ctc_loss", "aten::_use_cudnn_ctc_loss.Tensor", "aten::_use_miopen_ctc_loss", "aten::_use_miopen_ctc_loss.Tensor",
    "aten::_efficientzerotensor", "aten::_nested_view_from_buffer",
};
// How large the result is depends on values: a GPU's host waits for its count.
bool waits(const std::string& name) {
  static const std::set<std::string> some = {"nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive",
                                             "repeat_interleave", "bincount", "equal"};
  return some.count(name.substr(6, name.find('.') == std::string::npos ? std::string::npos : name.find('.') - 6));
}
// That, or there is no library for it.
bool cpu_only(const std::string& name) {
  static const std::set<std::string> some = {
      "nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "repeat_interleave", "bincount", "equal",
      "_linalg_eigh", "geqrf", "ormqr", "cholesky_inverse", "lu_unpack", "triangular_solve", "embedding_bag"};
  std::string base = name.substr(6, name.find('.') == std::string::npos ? std::string::npos : name.find('.') - 6);
  return some.count(base) || base.rfind("linalg_", 0) == 0 || base.rfind("_linalg_", 0) == 0 || base.rfind("_fft_", 0) == 0 || base.rfind("lu_", 0) == 0;
}

// A GPU keeps the moments of half numbers in float, where the CPU's operator wants all in one type or rounds them.
bool in_wide_numbers(const std::string& name) {
  static const std::set<std::string> some = {"aten::native_layer_norm", "aten::native_layer_norm_backward", "aten::native_group_norm",
                                             "aten::native_group_norm_backward"};
  return some.count(name);
}
// A copy in a type that every operator of the CPU's has; whole numbers, which may be indices, only where they are counted.
Tensor widened(const Tensor& t, const std::string& name) {
  if (t.layout() != at::kStrided) return t;
  Tensor made = same_memory(t);
  if (made.scalar_type() == at::kHalf || made.scalar_type() == at::kBFloat16) return made.to(at::kFloat);
  if (name == "aten::histc" && at::isIntegralType(made.scalar_type(), false)) return made.to(at::kDouble);
  return made.clone();
}

struct Shadow final : c10::OperatorKernel {
  Way way;
  c10::SafeKernelFunction original;
  Custom custom;
  std::vector<bool> mutated;
  int generator = -1;
  bool random = false;
  Shadow(Way way, c10::SafeKernelFunction original, Custom custom, const OperatorHandle& op)
      : way(way), original(std::move(original)), custom(custom) {
    const auto& schema = op.schema();
    for (size_t i = 0; i < schema.arguments().size(); i++) {
      const auto& argument = schema.arguments()[i];
      mutated.push_back(argument.alias_info() && argument.alias_info()->isWrite());
      if (argument.type()->str().find("Generator") != std::string::npos) generator = int(i);
    }
    for (auto tag : op.getTags()) random = random || tag == at::Tag::nondeterministic_seeded;
    random = random || generator >= 0 || op.schema().name().find("attention") != std::string::npos;
  }

  // Where CUDA's generator stands.
  gpu_random::Stream stream(const std::vector<IValue>& arguments) const {
    int device = c10::cuda::current_device();
    for (const IValue& a : arguments) each_tensor(a, [&](const Tensor& t) { if (on_gpu(t)) device = t.get_device(); });
    at::Generator source;
    if (generator >= 0 && !arguments[generator].isNone()) source = arguments[generator].toGenerator();
    if (!source.defined() || source.device().is_cpu()) source = at::cuda::detail::getDefaultCUDAGenerator(device);
    auto* cuda = at::check_generator<at::CUDAGeneratorImpl>(source);
    int processors = 0, threads = 0;
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    cudaDeviceGetAttribute(&threads, cudaDevAttrMaxThreadsPerMultiProcessor, device);
    return {cuda->current_seed(), cuda->get_offset(), processors, threads};
  }

  uint64_t seed(const std::vector<IValue>& arguments) const { // for draws that aren't a GPU's
    auto from = stream(arguments);
    uint64_t mixed = from.seed * 0x9e3779b97f4a7c15ull + from.offset * 0xbf58476d1ce4e5b9ull;
    return (mixed ^ (mixed >> 31)) | 2;
  }

  // CUDA's implementation moves the generator on; what its kernels would have drawn is written afterwards.
  void draw(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
    size_t count = op.schema().arguments().size(), returns = op.schema().returns().size();
    std::vector<IValue> arguments(stack->end() - count, stack->end());
    gpu_random::Stream from = stream(arguments);
    bool composed = gpu_random::is_composed(full_name(op));
    depth += !composed;
    try { original.callBoxed(op, keys, stack); } catch (...) { depth -= !composed; throw; }
    depth -= !composed;
    Below below;
    std::vector<IValue> outputs(stack->end() - returns, stack->end());
    for (auto* values : {&arguments, &outputs})
      for (IValue& value : *values) value = map_tensors(value, same_memory);
    try { gpu_random::draw(full_name(op), arguments, outputs, from); }
    catch (const std::exception& error) { complain(op, std::string("isn't computed: ") + error.what()); }
  }

  static bool too_large(const OperatorHandle& op, Stack* stack) {
    if (limit == INT64_MAX) return false;
    int64_t bytes = 0;
    for (size_t i = stack->size() - op.schema().arguments().size(); i < stack->size(); i++)
      each_tensor((*stack)[i], [&](const Tensor& t) { if (t.defined()) bytes += int64_t(t.nbytes()); });
    return bytes > limit;
  }

  void operator()(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    if (way == Way::ORIGINAL || (depth && way != Way::CPU_ONLY) || (way != Way::CPU_ONLY && too_large(op, stack))) {
      original.callBoxed(op, keys, stack);
      return;
    }
    size_t count = op.schema().arguments().size(), returns = op.schema().returns().size();
    std::vector<IValue> arguments(stack->end() - count, stack->end());
    drain(c10::cuda::getCurrentCUDAStream().stream());
    if (way == Way::DRAWN) return draw(op, keys, stack);
    std::vector<IValue> given(count), results;
    uint64_t from = 0;
    std::optional<Tensor> generator_state;
    std::string failed; // why it isn't computed
    bool wide = in_wide_numbers(op.schema().name());
    auto run = [&] {
      Below below;
      failed.clear();
      for (size_t i = 0; i < count; i++)
        given[i] = map_tensors(arguments[i], [&](const Tensor& t) {
          if (!t.defined()) return t;
          if (wide) return widened(t, op.schema().name());
          return mutated[i] ? (t.layout() == at::kStrided ? same_memory(t).clone() : t) : same_memory(t);
        });
      if (random) {
        from = seed(arguments);
        if (generator >= 0) given[generator] = IValue(at::detail::createCPUGenerator(from));
      }
      if (custom) return;
      Stack inner(given.begin(), given.end());
      std::unique_lock<std::mutex> guard;
      static std::mutex one;
      auto cpu_generator = at::detail::getDefaultCPUGenerator();
      if (random && generator < 0) {
        guard = std::unique_lock<std::mutex>(one);
        std::lock_guard<std::mutex> inside(cpu_generator.mutex());
        generator_state = cpu_generator.get_state();
        cpu_generator.set_current_seed(from);
      }
      try {
        op.callBoxed(&inner);
        results.assign(inner.begin(), inner.end());
      } catch (const std::exception& error) {
        failed = error.what();
      }
      if (generator_state) { std::lock_guard<std::mutex> inside(cpu_generator.mutex()); cpu_generator.set_state(*generator_state); }
    };
    run();
    if (!failed.empty() && !wide && !random) {
      wide = true;
      run();
    }
    if (way == Way::CPU_ONLY && failed.empty()) {
      // repeat_interleave knows its size from the caller where it is told.
      bool told = op.schema().name() == "aten::repeat_interleave" && !arguments.back().isNone();
      if (waits(op.schema().name()) && !told) c10::cuda::stream_synchronize(c10::cuda::getCurrentCUDAStream().stream());
      for (size_t i = 0; i < returns; i++) {
        int written = -1; // an output that was given
        const auto* about = op.schema().returns()[i].alias_info();
        for (size_t a = 0; about && about->isWrite() && a < count; a++)
          if (mutated[a] && op.schema().arguments()[a].alias_info()->beforeSets() == about->beforeSets()) written = int(a);
        if (written >= 0) {
          Tensor to = arguments[written].toTensor(), made = results[i].toTensor();
          if (to.sizes() != made.sizes()) to.resize_(made.sizes());
          Below below;
          fill(to, made, op);
          results[i] = to;
        } else {
          Below below;
          c10::Device device(at::kCUDA, c10::cuda::current_device());
          for (const IValue& a : arguments) each_tensor(a, [&](const Tensor& t) { if (on_gpu(t)) device = t.device(); });
          results[i] = map_tensors(results[i], [&](const Tensor& t) {
            if (!t.defined()) return t;
            Tensor to = at::empty_strided(t.sizes(), t.strides(), t.options().device(device));
            fill(to, t, op);
            return to;
          });
        }
      }
      stack->erase(stack->end() - count, stack->end());
      stack->insert(stack->end(), results.begin(), results.end());
      return;
    }
    depth++;
    try { original.callBoxed(op, keys, stack); } catch (...) { depth--; throw; }
    depth--;
    Below below;
    std::vector<IValue> outputs(stack->end() - returns, stack->end());
    if (custom) {
      try { results = custom(given, outputs, from); }
      catch (const std::exception& error) { failed = error.what(); }
    }
    if (!failed.empty()) return complain(op, "isn't computed: " + failed);
    for (size_t i = 0; i < returns && i < results.size(); i++) {
      const auto* about = op.schema().returns()[i].alias_info();
      if (!about || !about->isWrite()) fill(outputs[i], results[i], op);
    }
    for (size_t i = 0; i < count; i++) if (mutated[i]) fill(arguments[i], given[i], op);
  }
};

int install() {
  auto& dispatcher = c10::Dispatcher::singleton();
  static std::vector<std::unique_ptr<torch::Library>> libraries;
  libraries.push_back(std::make_unique<torch::Library>(torch::Library::IMPL, "aten", std::nullopt, __FILE__, __LINE__));
  int taken = 0;
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema()) continue;
    std::string full = c10::toString(name);
    bool copies = full == "aten::copy_";
    if (!op->hasKernelForDispatchKey(DispatchKey::CUDA) && !copies) continue;
    Way way = gpu_random::draws_as_gpu(full) ? Way::DRAWN : originals.count(full) ? Way::ORIGINAL : customs.count(full) ? Way::CUSTOM : cpu_only(full) ? Way::CPU_ONLY : Way::SHADOW;
    bool view = false;
    for (const auto& result : op->schema().returns()) view = view || (result.alias_info() && !result.alias_info()->isWrite());
    if (view || way == Way::ORIGINAL) continue;
    auto custom = customs.find(full);
    auto functor = std::make_unique<Shadow>(way, op->getComputedKernelForDispatchKey(DispatchKey::CUDA), custom == customs.end() ? nullptr : custom->second, *op);
    libraries[0]->impl(full.c_str(), torch::dispatch(DispatchKey::CUDA, torch::CppFunction::makeFromBoxedFunctor(std::move(functor))));
    taken++;
  }
  if (tracing) std::fprintf(stderr, "nullgpu: %d operators are computed\n", taken);
  return taken;
}
// Warned of by torch: kernels are replaced, which is what is meant.
int quiet() {
  int level = FLAGS_caffe2_log_level;
  FLAGS_caffe2_log_level = 2;
  int taken = install();
  FLAGS_caffe2_log_level = level;
  return taken;
}
int installed = quiet();

} // namespace
