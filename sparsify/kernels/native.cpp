// Error feedback and exact top-k in one pass over memory: read the residual, read the gradient, write the sum.
//
// Guess a lower bound of the k-th magnitude from a sample; add, and keep what reaches the bound; find the k largest
// among those few. Had fewer than k reached it, or too many, the k largest are looked for in the whole sum instead: the
// guess decides how fast it is, never what is selected. (TensorRT-LLM's guess-verify-refine does this on GPUs.)
//
// Magnitudes are compared as integers, by their bits without the sign: NaN is above infinity, and nothing is rounded.
// Of equal ones the smallest indices are taken. No torch header is needed, so any torch can load what is built once.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_X86 1
#include <immintrin.h>
#endif

namespace {

using Key = uint32_t;
constexpr Key MAGNITUDE = 0x7fffffffu;
constexpr int64_t PER_THREAD = 1 << 19;  // fewer elements than this are not worth a thread
constexpr int64_t UNSAMPLED = 1 << 14;   // so few elements are looked through without a guess
constexpr int64_t SAMPLE = 1 << 16;
constexpr int64_t RUN = 8;  // elements in a row of the sample: half a cache line
constexpr int64_t SLACK = 64;  // whole vectors are stored, so candidates may end this far behind their number

enum Kind : int32_t { NONE, FP32, BF16, FP16 };  // of the gradient; NONE: there is nothing to add
enum Level : int32_t { SCALAR, AVX2, AVX512 };

Key key_of(float value) {
  Key bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits & MAGNITUDE;
}

float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

float from_half(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 0x1f, mantissa = half & 0x3ffu;
  if (exponent == 0x1f) return from_bits(sign | 0x7f800000u | mantissa << 13);
  if (exponent) return from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
  const float small = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // 2^-24
  return sign ? -small : small;
}

template <Kind kind>
float load(const void* grad, int64_t i) {
  if (kind == FP32) return static_cast<const float*>(grad)[i];
  if (kind == BF16) return from_bits(uint32_t{static_cast<const uint16_t*>(grad)[i]} << 16);
  return from_half(static_cast<const uint16_t*>(grad)[i]);
}

float load_any(const void* grad, int32_t kind, int64_t i) {
  return kind == FP32 ? load<FP32>(grad, i) : kind == BF16 ? load<BF16>(grad, i) : load<FP16>(grad, i);
}

// What one thread found, in the order of its indices. Counts on when it is full.
struct Candidates {
  int32_t* indices;
  float* values;
  int64_t capacity;
  int64_t found = 0;
  bool full = false;

  void add(int64_t i, float value) {
    if (found < capacity) {
      indices[found] = static_cast<int32_t>(i);
      values[found] = value;
    } else {
      full = true;
    }
    ++found;
  }
};

// acc += grad from begin to end; what reaches the bound is a candidate.
template <Kind kind>
void stream_scalar(float* acc, const void* grad, int64_t begin, int64_t end, Key bound, Candidates& out) {
  constexpr int64_t BLOCK = 64;
  for (int64_t start = begin; start < end; start += BLOCK) {
    const int64_t stop = std::min(start + BLOCK, end);
    int reached = 0;
    for (int64_t i = start; i < stop; ++i) {  // without a branch, so that compilers make vectors of it
      if (kind != NONE) acc[i] += load<kind>(grad, i);
      reached += key_of(acc[i]) >= bound;
    }
    if (reached)
      for (int64_t i = start; i < stop; ++i)
        if (key_of(acc[i]) >= bound) out.add(i, acc[i]);
  }
}

#ifdef HAS_X86
template <Kind kind>
__attribute__((target("avx2,f16c"))) __m256 load8(const void* grad, int64_t i) {
  if (kind == FP32) return _mm256_loadu_ps(static_cast<const float*>(grad) + i);
  const __m128i narrow = _mm_loadu_si128(
      reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(grad) + i));
  if (kind == FP16) return _mm256_cvtph_ps(narrow);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16));
}

template <Kind kind>
__attribute__((target("avx2,f16c"))) void stream_avx2(
    float* acc, const void* grad, int64_t begin, int64_t end, Key bound, Candidates& out) {
  const __m256i magnitude = _mm256_set1_epi32(MAGNITUDE);
  // Keys are at most 0x7fffffff, so signed comparisons serve; a bound beyond is reached by none, one of 0 by all.
  const __m256i below = _mm256_set1_epi32(static_cast<int32_t>(std::min(bound, MAGNITUDE)) - 1);
  const int possible = bound > MAGNITUDE ? 0 : 0xff;
  int64_t i = begin;
  for (; i + 8 <= end; i += 8) {
    __m256 sum = _mm256_loadu_ps(acc + i);
    if (kind != NONE) {
      sum = _mm256_add_ps(sum, load8<kind>(grad, i));
      _mm256_storeu_ps(acc + i, sum);
    }
    const __m256i keys = _mm256_and_si256(_mm256_castps_si256(sum), magnitude);
    int reached = possible & _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(keys, below)));
    for (; reached; reached &= reached - 1) {
      const int64_t at = i + __builtin_ctz(reached);
      out.add(at, acc[at]);
    }
  }
  stream_scalar<kind>(acc, grad, i, end, bound, out);
}

template <Kind kind>
__attribute__((target("avx512f"))) __m512 load16(const void* grad, int64_t i) {
  if (kind == FP32) return _mm512_loadu_ps(static_cast<const float*>(grad) + i);
  const __m256i narrow = _mm256_loadu_si256(
      reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(grad) + i));
  if (kind == FP16) return _mm512_cvtph_ps(narrow);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

__attribute__((target("avx512f"))) inline void add16(
    __m512 sum, __mmask16 reached, __m512i indices, Candidates& out) {
  if (out.found + 16 <= out.capacity + SLACK) {
    // Compressed in a register and stored whole: the masked store is slow on some processors.
    _mm512_storeu_si512(out.indices + out.found, _mm512_maskz_compress_epi32(reached, indices));
    _mm512_storeu_ps(out.values + out.found, _mm512_maskz_compress_ps(reached, sum));
  }
  out.found += __builtin_popcount(reached);
  out.full |= out.found > out.capacity;
}

template <Kind kind>
__attribute__((target("avx512f"))) void stream_avx512(
    float* acc, const void* grad, int64_t begin, int64_t end, Key bound, Candidates& out) {
  const __m512i magnitude = _mm512_set1_epi32(MAGNITUDE), least = _mm512_set1_epi32(static_cast<int32_t>(bound));
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  constexpr int VECTORS = 4;  // a cache line each; mostly none of them holds a candidate
  int64_t i = begin;
  for (; i + 16 * VECTORS <= end; i += 16 * VECTORS) {
    __m512 sums[VECTORS];
    __mmask16 reached[VECTORS];
    for (int v = 0; v < VECTORS; ++v) {
      sums[v] = _mm512_loadu_ps(acc + i + 16 * v);
      if (kind != NONE) {
        sums[v] = _mm512_add_ps(sums[v], load16<kind>(grad, i + 16 * v));
        _mm512_storeu_ps(acc + i + 16 * v, sums[v]);
      }
      const __m512i keys = _mm512_and_si512(_mm512_castps_si512(sums[v]), magnitude);
      reached[v] = _mm512_cmpge_epu32_mask(keys, least);
    }
    if (reached[0] | reached[1] | reached[2] | reached[3])
      for (int v = 0; v < VECTORS; ++v)
        if (reached[v]) {
          const __m512i start = _mm512_set1_epi32(static_cast<int32_t>(i + 16 * v));
          add16(sums[v], reached[v], _mm512_add_epi32(start, lanes), out);
        }
  }
  stream_scalar<kind>(acc, grad, i, end, bound, out);
}
#endif

int32_t best_level() {
#ifdef HAS_X86
  if (__builtin_cpu_supports("avx512f")) return AVX512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return AVX2;
#endif
  return SCALAR;
}

template <Kind kind>
void stream(float* acc, const void* grad, int64_t begin, int64_t end, Key bound, int32_t level, Candidates& out) {
#ifdef HAS_X86
  if (level == AVX512) return stream_avx512<kind>(acc, grad, begin, end, bound, out);
  if (level == AVX2) return stream_avx2<kind>(acc, grad, begin, end, bound, out);
#endif
  stream_scalar<kind>(acc, grad, begin, end, bound, out);
}

void stream_any(
    float* acc, const void* grad, int32_t kind, int64_t begin, int64_t end, Key bound, int32_t level, Candidates& out) {
  switch (kind) {
    case FP32: return stream<FP32>(acc, grad, begin, end, bound, level, out);
    case BF16: return stream<BF16>(acc, grad, begin, end, bound, level, out);
    case FP16: return stream<FP16>(acc, grad, begin, end, bound, level, out);
    default: return stream<NONE>(acc, grad, begin, end, bound, level, out);
  }
}

int64_t num_parts(int64_t n, int64_t threads) {
  return std::max<int64_t>(1, std::min(threads, n / PER_THREAD));
}

// Where part `at` of `parts` begins: at whole cache lines, so that no two threads write to one.
int64_t part_start(int64_t n, int64_t parts, int64_t at) { return at == parts ? n : n / parts * at / 16 * 16; }

// The whole pass, in as many threads. Parts follow each other in the order of their indices.
std::vector<Candidates> pass(
    float* acc, const void* grad, int32_t kind, int64_t n, Key bound, int32_t level, int64_t threads, int32_t* indices,
    float* values, int64_t capacity) {
  const int64_t parts = num_parts(n, threads);
  std::vector<Candidates> found;
  for (int64_t at = 0; at < parts; ++at)
    found.push_back({indices + at * (capacity + SLACK), values + at * (capacity + SLACK), capacity});
  const auto work = [&](int64_t at) {
    Candidates own = found[at];  // lest two threads count in one cache line
    stream_any(acc, grad, kind, part_start(n, parts, at), part_start(n, parts, at + 1), bound, level, own);
    found[at] = own;
  };
  std::vector<std::thread> others;
  for (int64_t at = 1; at < parts; ++at) {
    try {
      others.emplace_back(work, at);
    } catch (const std::system_error&) {  // no more threads can be had: then this one does it
      work(at);
    }
  }
  work(0);
  for (auto& other : others) other.join();
  return found;
}

// Elements in the order of their indices; without `indices`, they are 0, 1, ...
struct Span {
  const int32_t* indices;
  const float* values;
  int64_t count;
};

struct Border {
  Key key;       // of the k-th largest magnitude
  int64_t ties;  // how many of this very key are among the first k
};

// Radix selection, 11 + 11 + 9 bits: three passes over the spans.
Border border(const std::vector<Span>& spans, int64_t k) {
  constexpr int SHIFTS[] = {20, 9, 0}, BITS[] = {11, 11, 9};
  Key known = 0, mask = 0;
  int64_t left = k;
  for (int level = 0; level < 3; ++level) {
    const Key bins = 1u << BITS[level];
    std::vector<int64_t> counts(bins, 0);
    for (const Span& span : spans)
      for (int64_t i = 0; i < span.count; ++i) {
        const Key key = key_of(span.values[i]);
        if ((key & mask) == known) ++counts[key >> SHIFTS[level] & (bins - 1)];
      }
    Key bin = bins - 1;
    while (counts[bin] < left) left -= counts[bin--];
    known |= bin << SHIFTS[level];
    mask |= (bins - 1) << SHIFTS[level];
  }
  return {known, left};
}

void emit(const std::vector<Span>& spans, Border at, int32_t* indices, float* values) {
  for (const Span& span : spans)
    for (int64_t i = 0; i < span.count; ++i) {
      const Key key = key_of(span.values[i]);
      if (key < at.key || (key == at.key && at.ties-- <= 0)) continue;
      *indices++ = span.indices ? span.indices[i] : static_cast<int32_t>(i);
      *values++ = span.values[i];
    }
}

struct Guess {
  int64_t sample;  // elements looked at; 0: no guess is made
  int64_t rank;    // of the sample, counted from its largest, that serves as the bound
};

// The sample's r S-th largest would be right on average. Further down by four standard deviations, of twice the
// variance because neighbours resemble each other, which makes a sample of runs as good as one of fewer elements.
Guess guess(int64_t n, int64_t k) {
  if (n < UNSAMPLED) return {0, 0};
  const int64_t sample = std::min(SAMPLE, n / 16) / RUN * RUN;
  const double expected = static_cast<double>(k) / static_cast<double>(n) * static_cast<double>(sample);
  const int64_t rank = static_cast<int64_t>(expected + 6 * std::sqrt(expected) + 8);
  return rank > sample / 2 ? Guess{0, 0} : Guess{sample, rank};
}

Key bound_of(const float* acc, const void* grad, int32_t kind, int64_t n, Guess made) {
  std::vector<float> sample(made.sample);
  const int64_t runs = made.sample / RUN, stride = n / runs;
  for (int64_t run = 0; run < runs; ++run) {
    // Somewhere within its stride, by a hash: a fixed place would always meet the same place of a layer's rows.
    const uint64_t mixed = (static_cast<uint64_t>(run) + 1) * 0x9E3779B97F4A7C15u;
    const int64_t start = run * stride + static_cast<int64_t>((mixed >> 33) % static_cast<uint64_t>(stride - RUN + 1));
    for (int64_t i = 0; i < RUN; ++i) {
      const float owed = acc[start + i];
      sample[run * RUN + i] = kind == NONE ? owed : owed + load_any(grad, kind, start + i);
    }
  }
  return border({{nullptr, sample.data(), made.sample}}, made.rank).key;
}

}  // namespace

extern "C" {

int32_t sparsify_level() { return best_level(); }

int64_t sparsify_parts(int64_t n, int64_t threads) { return num_parts(n, threads); }

int64_t sparsify_slack() { return SLACK; }

// Candidates that each part has room for in `sparsify_topk`.
int64_t sparsify_capacity(int64_t n, int64_t k, int64_t threads) {
  const Guess made = guess(n, k);
  if (!made.sample) return 0;
  const double share = 1.5 * static_cast<double>(made.rank) / static_cast<double>(made.sample);
  return std::min(n / num_parts(n, threads) + 16, static_cast<int64_t>(share * static_cast<double>(n)) + 4096);
}

// acc (n) += grad (n); the k largest magnitudes into indices (k) and values (k), by ascending index. The candidate
// buffers have room for parts x (capacity + slack). `forced`: take this key for the bound, if it is not negative.
// Returns how many candidates there were, or -1 where the bound was wrong, or -2 where none was guessed.
int64_t sparsify_topk(
    float* acc, const void* grad, int32_t kind, int64_t n, int64_t k, int32_t level, int64_t threads,
    int32_t* candidate_indices, float* candidate_values, int64_t capacity, int64_t forced, int32_t* indices,
    float* values) {
  const Guess made = guess(n, k);
  const bool guessed = k > 0 && (made.sample || forced >= 0);
  const Key nothing = 0xffffffffu;
  const Key bound = !guessed ? nothing : forced >= 0 ? static_cast<Key>(forced) : bound_of(acc, grad, kind, n, made);
  const auto found =
      pass(acc, grad, kind, n, bound, level, threads, candidate_indices, candidate_values, guessed ? capacity : 0);
  if (!k) return -2;
  std::vector<Span> spans;
  int64_t total = 0;
  bool full = false;
  for (const Candidates& one : found) {
    spans.push_back({one.indices, one.values, one.found});
    total += one.found;
    full |= one.full;
  }
  const bool right = guessed && !full && total >= k;
  if (!right) spans = {{nullptr, acc, n}};
  emit(spans, border(spans, k), indices, values);
  return right ? total : guessed ? -1 : -2;
}

// acc (n) += grad (n); how many of each part have a key of at least `bound` into counts (parts), and these, as far as
// there is room, into the buffers.
void sparsify_above(
    float* acc, const void* grad, int32_t kind, int64_t n, uint32_t bound, int32_t level, int64_t threads,
    int32_t* candidate_indices, float* candidate_values, int64_t capacity, int64_t* counts) {
  const auto found =
      pass(acc, grad, kind, n, bound, level, threads, candidate_indices, candidate_values, capacity);
  for (const Candidates& one : found) *counts++ = one.found;
}
}
