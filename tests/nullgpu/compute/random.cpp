// Each draw follows its CUDA kernel: what one thread draws, which elements it fills, and how 32 random bits become a number. Integers,
// uniform numbers and masks are equal to a GPU's bit for bit. What goes through a GPU's fast sine, exponential or logarithm (normal_,
// exponential_, log_normal_, cauchy_, geometric_) is equal to about 1e-6: those units round in a way of their own.
#include "random.h"

#include <ATen/AccumulateType.h>
#include <ATen/Dispatch.h>
#include <ATen/Dispatch_v2.h>
#include <ATen/ExpandUtils.h>
#include <ATen/OpMathType.h>
#include <ATen/core/DistributionsHelper.h>
#include <ATen/native/DistributionTemplates.h>
#include <ATen/native/TensorIterator.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <unordered_map>

namespace gpu_random {
namespace {

using at::IValue;
using at::Tensor;
using at::TensorIteratorBase;
using Words = std::array<uint32_t, 4>;
using Args = const std::vector<IValue>&;
using Generator = std::optional<at::Generator>;

thread_local Stream current; // of the operator that draws

// -- Philox4x32-10 (Salmon et al. 2011), and curand's numbers -----------------------------------------------------------------------------
Words philox(Words counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; round++) {
    uint64_t a = uint64_t(0xD2511F53) * counter[0], b = uint64_t(0xCD9E8D57) * counter[2];
    counter = {uint32_t(b >> 32) ^ counter[1] ^ key0, uint32_t(b), uint32_t(a >> 32) ^ counter[3] ^ key1, uint32_t(a)};
    key0 += 0x9E3779B9, key1 += 0xBB67AE85;
  }
  return counter;
}
// The words of a thread's n-th call of curand4.
Words words(const Stream& s, uint64_t thread, uint64_t call) {
  uint64_t at = s.offset / 4 + call;
  return philox({uint32_t(at), uint32_t(at >> 32), uint32_t(thread), uint32_t(thread >> 32)}, uint32_t(s.seed), uint32_t(s.seed >> 32));
}

constexpr float TO_UNIT = 0x1p-32f, TO_CIRCLE = TO_UNIT * 6.2831855f;
constexpr double TO_UNIT_DOUBLE = 0x1p-53;
uint64_t joined(uint32_t low, uint32_t high) { return uint64_t(low) ^ (uint64_t(high) << 21); } // 53 bits
float uniform(uint32_t word) { return float(word) * TO_UNIT + TO_UNIT / 2; } // above 0, up to 1
double uniform(uint32_t low, uint32_t high) { return double(joined(low, high)) * TO_UNIT_DOUBLE + TO_UNIT_DOUBLE / 2; }

// A distribution's numbers of one call: four of 32 bits each, or two of 64.
template <typename T, int N> using Numbers = std::array<T, N>;
template <typename T> struct Uniform { // float
  static constexpr int each = 4;
  static Numbers<float, 4> of(const Words& w) { return {uniform(w[0]), uniform(w[1]), uniform(w[2]), uniform(w[3])}; }
};
template <> struct Uniform<double> {
  static constexpr int each = 2;
  static Numbers<double, 2> of(const Words& w) { return {uniform(w[0], w[1]), uniform(w[2], w[3])}; }
};
template <typename T> struct Normal {
  static constexpr int each = 4;
  static void pair(uint32_t x, uint32_t y, float* to) { // Box and Muller's
    float angle = std::fma(float(y), TO_CIRCLE, TO_CIRCLE / 2), radius = std::sqrt(-2.0f * std::log(uniform(x)));
    to[0] = std::sin(angle) * radius, to[1] = std::cos(angle) * radius;
  }
  static Numbers<float, 4> of(const Words& w) {
    Numbers<float, 4> made;
    pair(w[0], w[1], &made[0]), pair(w[2], w[3], &made[2]);
    return made;
  }
};
template <> struct Normal<double> {
  static constexpr int each = 2;
  static Numbers<double, 2> of(const Words& w) {
    double angle = (double(joined(w[2], w[3])) * TO_UNIT_DOUBLE * 2 + TO_UNIT_DOUBLE) * c10::pi<double>;
    double radius = std::sqrt(-2.0 * std::log(uniform(w[0], w[1])));
    return {std::sin(angle) * radius, std::cos(angle) * radius};
  }
};
struct Words32 {
  static constexpr int each = 4;
  static Words of(const Words& w) { return w; }
};
struct Words64 {
  static constexpr int each = 2;
  static Numbers<uint64_t, 2> of(const Words& w) { return {(uint64_t(w[0]) << 32) | w[1], (uint64_t(w[2]) << 32) | w[3]}; }
};

// -- which thread draws which element ------------------------------------------------------------------------------------------------------
constexpr int64_t BLOCK = 256;
int64_t threads_of(int64_t elements) { // calc_execution_policy's
  return BLOCK * std::min(current.processors * (current.threads_each / BLOCK), (elements + BLOCK - 1) / BLOCK);
}
// Element i is drawn by thread i % threads: its first call fills the elements i / threads = 0 .. each - 1, and so on.
template <typename From, typename To> void draw_each(int64_t elements, To&& to) {
  int64_t threads = threads_of(elements);
  for (int64_t first = 0, call = 0; first < elements; first += threads * From::each, call++)
    for (int64_t thread = 0; thread < threads && first + thread < elements; thread++) {
      auto made = From::of(words(current, thread, call));
      for (int64_t k = 0, at = first + thread; k < From::each && at < elements; k++, at += threads) to(at, made[k]);
    }
}
// Elements in the order of the iterator's dimensions, which is that of memory.
template <typename scalar_t, typename From, typename To> void fill(TensorIteratorBase& iter, To&& transform) {
  TORCH_CHECK(iter.can_use_32bit_indexing(), "a draw of more than 2^31 bytes isn't on the stub");
  auto shape = iter.shape(), strides = iter.strides(0);
  char* data = static_cast<char*>(iter.data_ptr(0));
  draw_each<From>(iter.numel(), [&](int64_t index, auto number) {
    int64_t offset = 0;
    for (size_t d = 0; d < shape.size(); d++) offset += index % shape[d] * strides[d], index /= shape[d];
    *reinterpret_cast<scalar_t*>(data + offset) = transform(number);
  });
}
// Elements in the order of these dimensions, the last one the fastest.
std::vector<int64_t> offsets_of(at::IntArrayRef sizes, at::IntArrayRef strides) {
  std::vector<int64_t> made{0};
  for (size_t d = 0; d < sizes.size(); d++) {
    std::vector<int64_t> next;
    next.reserve(made.size() * sizes[d]);
    for (int64_t at : made)
      for (int64_t i = 0; i < sizes[d]; i++) next.push_back(at + i * strides[d]);
    made = std::move(next);
  }
  return made;
}

// -- distributions: torch's own checks and arguments (ATen/native/DistributionTemplates.h) around these kernels ------------------------------
struct OnGpu {};
template <typename R> struct UniformKernel {
  void operator()(TensorIteratorBase& iter, double from_, double to_, Generator) {
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, iter.dtype(), "uniform", [&] {
      using number = at::opmath_type<scalar_t>;
      auto from = static_cast<scalar_t>(from_), to = static_cast<scalar_t>(to_);
      auto range = static_cast<number>(to - from);
      fill<scalar_t, Uniform<number>>(iter, [&](number x) {
        auto value = static_cast<scalar_t>(std::fma(x, range, static_cast<number>(from)));
        return value == to ? from : value; // (0, 1] becomes [0, 1)
      });
    });
  }
};
template <typename Change> void transformed_normal(TensorIteratorBase& iter, double mean_, double std_, Change&& change) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, iter.dtype(), "normal", [&] {
    using number = at::acc_type<scalar_t, true>;
    auto mean = static_cast<number>(mean_), std = static_cast<number>(std_);
    fill<scalar_t, Normal<number>>(iter, [&](number x) { return static_cast<scalar_t>(change(std::fma(x, std, mean))); });
  });
}
template <typename R> struct NormalKernel {
  void operator()(const at::TensorBase& self, double mean, double std, Generator) {
    auto iter = at::TensorIterator::borrowing_nullary_op(self);
    transformed_normal(iter, mean, std, [](auto x) { return x; });
  }
};
template <typename R> struct LogNormalKernel {
  void operator()(TensorIteratorBase& iter, double mean, double std, Generator) {
    transformed_normal(iter, mean, std, [](auto x) { return std::exp(x); });
  }
};
template <typename R> struct ExponentialKernel {
  void operator()(TensorIteratorBase& iter, double lambda, Generator) {
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, iter.dtype(), "exponential", [&] {
      using number = at::acc_type<scalar_t, true>;
      constexpr number half_step = std::numeric_limits<number>::epsilon() / 2;
      fill<scalar_t, Uniform<number>>(iter, [&](number x) {
        number log = x >= number(1) - half_step ? -half_step : std::log(x); // never 0
        return static_cast<scalar_t>(number(-1) / static_cast<number>(lambda) * log);
      });
    });
  }
};
template <typename R> struct CauchyKernel {
  void operator()(TensorIteratorBase& iter, double median, double sigma, Generator) {
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, iter.dtype(), "cauchy", [&] {
      using number = at::acc_type<scalar_t, true>;
      fill<scalar_t, Uniform<number>>(iter, [&](number x) {
        return static_cast<scalar_t>(at::transformation::cauchy<number>(x, static_cast<number>(median), static_cast<number>(sigma)));
      });
    });
  }
};
template <typename R> struct GeometricKernel {
  void operator()(TensorIteratorBase& iter, double p, Generator) {
    AT_DISPATCH_ALL_TYPES_AND2(at::kHalf, at::kBFloat16, iter.dtype(), "geometric", [&] {
      using number = at::DiscreteDistributionType<scalar_t>::type;
      fill<scalar_t, Uniform<number>>(iter, [&](number x) { return static_cast<scalar_t>(std::ceil(std::log(x) / std::log(1 - static_cast<number>(p)))); });
    });
  }
};
// The order in which CUDA_tensor_apply2 goes through two tensors: dimensions change places where it suits the memory of both.
void rearrange(std::vector<int64_t>& sizes, std::vector<int64_t>& a, std::vector<int64_t>& b) {
  for (size_t i = 0; i + 1 < sizes.size(); i++)
    for (size_t j = i + 1; sizes[i] != 1 && j < sizes.size(); j++) {
      if (sizes[j] == 1) continue;
      bool rising = a[i] < a[j] || b[i] < b[j], falling = a[i] > a[j] || b[i] > b[j];
      if (rising && !falling) std::swap(sizes[i], sizes[j]), std::swap(a[i], a[j]), std::swap(b[i], b[j]);
    }
}
template <typename R> struct BernoulliKernel {
  void operator()(const at::TensorBase& self, double p, Generator) {
    auto iter = at::TensorIterator::borrowing_nullary_op(self);
    AT_DISPATCH_ALL_TYPES_AND3(at::kHalf, at::kBFloat16, at::kBool, iter.dtype(), "bernoulli", [&] {
      using number = at::DiscreteDistributionType<scalar_t>::type;
      fill<scalar_t, Uniform<number>>(iter, [&](number x) { return static_cast<scalar_t>(x < static_cast<number>(p)); });
    });
  }
  // Each thread fills four neighbours, with as many threads as there are fours.
  void operator()(const at::TensorBase& self, const at::TensorBase& p_, Generator) {
    if (self.numel() == 0) return;
    Tensor p = at::Tensor(p_).to(self.scalar_type() == at::kDouble ? at::kDouble : at::kFloat).expand(self.sizes());
    std::vector<int64_t> sizes = self.sizes().vec(), to = self.strides().vec(), from = p.strides().vec();
    rearrange(sizes, to, from);
    auto places = offsets_of(sizes, to), chances = offsets_of(sizes, from);
    AT_DISPATCH_ALL_TYPES_AND3(at::kHalf, at::kBFloat16, at::kBool, self.scalar_type(), "bernoulli", [&] {
      using chance_t = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
      auto* out = static_cast<scalar_t*>(self.data_ptr());
      const auto* chance = p.const_data_ptr<chance_t>();
      for (size_t i = 0; i < places.size(); i += 4) {
        auto made = Uniform<float>::of(words(current, i / 4, 0));
        for (size_t k = i; k < std::min(i + 4, places.size()); k++) out[places[k]] = static_cast<scalar_t>(made[k - i] <= chance[chances[k]]);
      }
    });
  }
};
template <typename R> struct RandomFromToKernel {
  void operator()(TensorIteratorBase& iter, uint64_t range, int64_t base, Generator) {
    AT_DISPATCH_V2(iter.dtype(), "random_from_to", AT_WRAP([&] {
      auto one = [&](auto word) { return static_cast<scalar_t>(static_cast<int64_t>(word % range + base)); };
      range >> 28 ? fill<scalar_t, Words64>(iter, one) : fill<scalar_t, Words32>(iter, one); // less skew
    }), AT_EXPAND(AT_ALL_TYPES), at::kBool, at::kHalf, at::kBFloat16, AT_EXPAND(AT_BAREBONES_UNSIGNED_TYPES));
  }
  void operator()(TensorIteratorBase& iter, Generator) {
    AT_DISPATCH_ALL_TYPES_AND(at::kBFloat16, iter.dtype(), "random_full_64_bits", [&] {
      fill<scalar_t, Words64>(iter, [](uint64_t word) { return static_cast<scalar_t>(static_cast<int64_t>(word)); });
    });
  }
};
template <typename R> struct RandomKernel {
  void operator()(TensorIteratorBase& iter, Generator) {
    AT_DISPATCH_ALL_TYPES_AND3(at::kHalf, at::kBFloat16, at::kBool, iter.dtype(), "random", [&] {
      using From = std::conditional_t<std::is_same_v<scalar_t, double> || std::is_same_v<scalar_t, int64_t>, Words64, Words32>;
      fill<scalar_t, From>(iter, [](auto word) { return at::transformation::uniform_int<scalar_t>(word); });
    });
  }
};


// -- operators: how an operator's arguments reach a kernel --------------------------------------------------------------------------------
namespace templates = at::native::templates;
Tensor tensor(Args a, size_t i) { return a[i].toTensor(); }

template <Tensor& (*draw)(Tensor&, double, double, Generator)> void fill_by_two(Args a, Args) { // (self, x, y)
  Tensor self = tensor(a, 0);
  draw(self, a[1].toDouble(), a[2].toDouble(), {});
}
template <Tensor& (*draw)(Tensor&, double, Generator)> void fill_by_one(Args a, Args) { // (self, x)
  Tensor self = tensor(a, 0);
  draw(self, a[1].toDouble(), {});
}
void bernoulli_by_tensor(Args a, Args) { // (self, p)
  Tensor self = tensor(a, 0);
  templates::bernoulli_impl_<BernoulliKernel, OnGpu>(self, tensor(a, 1), {});
}
void bernoulli_out(Args a, Args out) { // (p)
  Tensor result = tensor(out, 0);
  templates::bernoulli_out_impl<BernoulliKernel, OnGpu>(result, tensor(a, 0), {});
}
void random_(Args a, Args) {
  Tensor self = tensor(a, 0);
  templates::random_impl<RandomKernel, OnGpu>(self, {});
}
void random_to(Args a, Args) {
  Tensor self = tensor(a, 0);
  templates::random_from_to_impl<RandomFromToKernel, OnGpu>(self, 0, a[1].toInt(), {});
}
void random_from(Args a, Args) {
  Tensor self = tensor(a, 0);
  templates::random_from_to_impl<RandomFromToKernel, OnGpu>(self, a[1].toInt(), a[2].toOptional<int64_t>(), {});
}
void normal(Args a, Args out) { // (mean, std)
  Tensor result = tensor(out, 0);
  if (!a[0].isTensor()) templates::normal_out_impl<NormalKernel, OnGpu>(result, a[0].toDouble(), tensor(a, 1), {});
  else if (!a[1].isTensor()) templates::normal_out_impl<NormalKernel, OnGpu>(result, tensor(a, 0), a[1].toDouble(), {});
  else templates::normal_out_impl<NormalKernel, OnGpu>(result, tensor(a, 0), tensor(a, 1), {});
}

// Dropout: as many elements at a time as memory allows (they are neighbours then), or one by one, in the order of the dimensions.
template <typename scalar_t, typename mask_t> void drop(const Tensor& self, double keep_, const Tensor& out, const Tensor& mask) {
  using number = at::acc_type<scalar_t, true>;
  int64_t elements = self.numel(), width = 1;
  if (self.is_non_overlapping_and_dense() && out.is_non_overlapping_and_dense() && mask.is_non_overlapping_and_dense()) {
    auto address = reinterpret_cast<uintptr_t>(self.const_data_ptr());
    width = 16 / sizeof(scalar_t);
    while (width > 1 && (address % (width * sizeof(scalar_t)) || elements % width)) width /= 2;
  }
  auto keep = static_cast<number>(keep_), scale = static_cast<number>(1.0 / keep);
  const auto* in = self.const_data_ptr<scalar_t>();
  auto* to = out.mutable_data_ptr<scalar_t>();
  auto* flags = mask.mutable_data_ptr<mask_t>();
  auto one = [&](float random, int64_t from, int64_t at) {
    float kept = random < keep;
    to[at] = static_cast<scalar_t>(in[from] * kept * scale);
    flags[at] = static_cast<mask_t>(kept);
  };
  if (width == 1) {
    auto from = offsets_of(self.sizes(), self.strides()), at = offsets_of(out.sizes(), out.strides());
    draw_each<Uniform<float>>(elements, [&](int64_t i, float random) { one(random, from[i], at[i]); });
    return;
  }
  int64_t threads = threads_of(elements), calls = (width + 3) / 4; // of curand_uniform4, for each group of neighbours
  for (int64_t first = 0, group = 0; first < elements; first += width, group++)
    for (int64_t call = 0; call < calls; call++) {
      auto made = Uniform<float>::of(words(current, group % threads, group / threads * calls + call));
      for (int64_t k = 0, at = first + call * 4; k < std::min<int64_t>(width, 4); k++, at++) one(made[k], at, at);
    }
}
template <typename mask_t> void dropped(const Tensor& self, double keep, Args out) {
  if (self.numel() == 0) return;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, self.scalar_type(), "dropout", [&] {
    drop<scalar_t, mask_t>(self, keep, tensor(out, 0), tensor(out, 1));
  });
}
void native_dropout(Args a, Args out) { // (input, p, train)
  double p = a[1].toDouble();
  if (a[2].isNone() || a[2].toBool()) {
    if (p != 1) return dropped<bool>(tensor(a, 0), 1. - p, out);
    tensor(out, 0).zero_(), tensor(out, 1).zero_();
  } else {
    tensor(out, 0).copy_(tensor(a, 0)), tensor(out, 1).fill_(true);
  }
}
void fused_dropout(Args a, Args out) { dropped<uint8_t>(tensor(a, 0), a[1].toDouble(), out); } // (self, p of being kept)

// A leaky ReLU whose slopes are drawn.
void rrelu_with_noise(Args a, Args out) { // (self, noise, lower, upper, training)
  Tensor self = tensor(a, 0), noise = tensor(a, 1), result = tensor(out, 0);
  double lower = a[2].toDouble(), upper = a[3].toDouble();
  if (!a[4].toBool()) {
    result.copy_(at::leaky_relu(self, (lower + upper) / 2));
    return;
  }
  Tensor in = self.contiguous(), made = at::empty(in.sizes(), in.options()), slopes = at::empty(in.sizes(), in.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, self.scalar_type(), "rrelu", [&] {
    using number = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
    const auto* from = in.const_data_ptr<scalar_t>();
    auto *to = made.mutable_data_ptr<scalar_t>(), *slope = slopes.mutable_data_ptr<scalar_t>();
    draw_each<Uniform<number>>(in.numel(), [&](int64_t i, number random) {
      slope[i] = from[i] <= scalar_t(0) ? static_cast<scalar_t>(static_cast<scalar_t>(random) * (upper - lower) + lower) : scalar_t(1);
      to[i] = from[i] <= scalar_t(0) ? static_cast<scalar_t>(from[i] * slope[i]) : from[i];
    });
  });
  result.copy_(made), noise.copy_(slopes);
}

// A permutation sorts the elements by random keys of so many bits that few are equal, and shuffles those whose keys are.
template <typename Key> std::vector<int64_t> permutation(int64_t n, int bits) {
  Tensor keys = at::empty({n}, c10::CppTypeToScalarType<Key>::value);
  templates::random_from_to_impl<RandomFromToKernel, OnGpu>(keys, std::numeric_limits<Key>::min(), std::numeric_limits<Key>::max(), {});
  int64_t drawn = ((n - 1) / (threads_of(n) * Words64::each) + 1) * 4; // by which the generator has moved on
  Key mask = static_cast<Key>((uint64_t(1) << bits) - 1);
  bool all_bits = bits == 8 * sizeof(Key); // then the sign counts, otherwise it isn't looked at
  const Key* key = keys.const_data_ptr<Key>();
  auto rank = [&](int64_t i) { return all_bits ? key[i] : static_cast<Key>(key[i] & mask); };
  std::vector<int64_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t i, int64_t j) { return rank(i) < rank(j); });
  Stream then = current;
  then.offset += drawn;
  for (int64_t first = 0, end = 0; first < n; first = end) {
    for (end = first + 1; end < n && rank(order[end]) == rank(order[first]);) end++;
    for (int64_t i = end - first - 1, call = 0; i > 0; i--, call++) {
      uint32_t other = words(then, first, call / 4)[call % 4] % uint32_t(i + 1);
      std::swap(order[first + i], order[first + other]);
    }
  }
  return order;
}
void randperm(Args a, Args out) { // (n)
  int64_t n = a[0].toInt();
  if (n == 0) return;
  double real = static_cast<double>(n);
  int bits = std::min(64, static_cast<int>(std::ceil(std::log2(real - (6 * real * real + 1) / (std::log(0.9) * 12)))));
  tensor(out, 0).copy_(at::tensor(bits <= 32 ? permutation<int>(n, bits) : permutation<int64_t>(n, bits), at::kLong));
}

// Several samples with replacement: each thread looks one number up in the sums of the chances. Otherwise it is made of exponential_.
void multinomial(Args a, Args out) { // (self, num_samples, replacement)
  int64_t samples = a[1].toInt(), categories = tensor(a, 0).size(-1), rows = tensor(a, 0).numel() / categories;
  if (!a[2].toBool() || samples == 1) return;
  Tensor chances = tensor(a, 0).reshape({rows, categories}).clone();
  chances.div_(chances.sum(1, true));
  Tensor sums = chances.cumsum(1).to(at::kDouble).contiguous(), result = at::empty({rows, samples}, at::kLong);
  chances = chances.to(at::kDouble).contiguous();
  Tensor narrow = at::empty({1}, tensor(a, 0).options());
  int64_t threads_a_row = (samples + 127) / 128 * 128, rows_at_once = std::min<int64_t>(rows, 65535);
  for (int64_t row = 0; row < rows; row++) {
    const double *sum = sums.const_data_ptr<double>() + row * categories, *chance = chances.const_data_ptr<double>() + row * categories;
    for (int64_t sample = 0; sample < samples; sample++) {
      float drawn = uniform(words(current, row % rows_at_once * threads_a_row + sample, row / rows_at_once)[0]);
      double number = narrow.fill_(drawn).item<double>(); // in the chances' type
      int64_t at = std::min<int64_t>(std::lower_bound(sum, sum + categories, number) - sum, categories - 1);
      while (at >= 1 && chance[at] == 0) at--;
      result.mutable_data_ptr<int64_t>()[row * samples + sample] = at;
    }
  }
  tensor(out, 0).copy_(result.reshape(tensor(out, 0).sizes()));
}

using Draws = std::unordered_map<std::string, void (*)(Args, Args)>;
const Draws& draws() { // made when it is first asked for, which another file's start may do
  static const Draws made = {
      {"aten::uniform_", fill_by_two<templates::uniform_impl_<UniformKernel, OnGpu>>},
      {"aten::normal_", fill_by_two<templates::normal_impl_<NormalKernel, OnGpu>>},
      {"aten::log_normal_", fill_by_two<templates::log_normal_impl_<LogNormalKernel, OnGpu>>},
      {"aten::cauchy_", fill_by_two<templates::cauchy_impl_<CauchyKernel, OnGpu>>},
      {"aten::exponential_", fill_by_one<templates::exponential_impl_<ExponentialKernel, OnGpu>>},
      {"aten::geometric_", fill_by_one<templates::geometric_impl_<GeometricKernel, OnGpu>>},
      {"aten::bernoulli_.float", fill_by_one<templates::bernoulli_impl_<BernoulliKernel, OnGpu>>},
      {"aten::bernoulli_.Tensor", bernoulli_by_tensor},
      {"aten::bernoulli.out", bernoulli_out},
      {"aten::random_", random_},
      {"aten::random_.to", random_to},
      {"aten::random_.from", random_from},
      {"aten::normal.Tensor_float", normal},
      {"aten::normal.float_Tensor", normal},
      {"aten::normal.Tensor_Tensor", normal},
      {"aten::normal.Tensor_float_out", normal},
      {"aten::normal.float_Tensor_out", normal},
      {"aten::normal.Tensor_Tensor_out", normal},
      {"aten::native_dropout", native_dropout},
      {"aten::_fused_dropout", fused_dropout},
      {"aten::rrelu_with_noise", rrelu_with_noise},
      {"aten::rrelu_with_noise_", rrelu_with_noise},
      {"aten::rrelu_with_noise.out", rrelu_with_noise},
      {"aten::randperm.generator_out", randperm},
      {"aten::multinomial", multinomial},
      {"aten::multinomial.out", multinomial},
  };
  return made;
}

} // namespace

bool draws_as_gpu(const std::string& name) { return draws().count(name); }
bool is_composed(const std::string& name) { return name.rfind("aten::multinomial", 0) == 0; }
void draw(const std::string& name, Args arguments, Args outputs, const Stream& stream) {
  current = stream;
  draws().at(name)(arguments, outputs);
}

Tensor attention_mask(at::IntArrayRef sizes, double p, uint64_t seed, uint64_t offset) {
  Tensor mask = at::empty(sizes, at::kFloat);
  auto* to = mask.mutable_data_ptr<float>();
  auto dropped = static_cast<float>(p), scale = 1.0f / (1.0f - dropped);
  Stream stream{.seed = seed, .offset = offset / 4 * 4};
  Words four{};
  for (int64_t i = 0, skipped = offset % 4; i < mask.numel(); i++) {
    if ((i + skipped) % 4 == 0 || i == 0) four = words(stream, 0, (i + skipped) / 4);
    to[i] = uniform(four[(i + skipped) % 4]) > dropped ? scale : 0;
  }
  return mask;
}

} // namespace gpu_random

// Philox itself, for its known answers.
extern "C" void nullgpu_philox(const uint32_t* counter, const uint32_t* key, uint32_t* out) {
  auto made = gpu_random::philox({counter[0], counter[1], counter[2], counter[3]}, key[0], key[1]);
  std::copy(made.begin(), made.end(), out);
}
