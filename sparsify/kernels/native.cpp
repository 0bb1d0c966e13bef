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
constexpr int64_t ROOM = 8;  // candidates beyond 1/8 of all elements are not collected: all are looked through
constexpr Key NOTHING = 0xffffffffu;  // a bound that nothing reaches
constexpr int64_t RUN = 8;  // elements in a row of the sample: half a cache line

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

  bool full() const { return found > capacity; }

  // Of 64 elements, from `start` on, those that are marked.
  void add(const float* acc, int64_t start, uint64_t marks) {
    for (; marks; marks &= marks - 1, ++found) {
      if (found >= capacity) continue;
      const int64_t at = start + __builtin_ctzll(marks);
      indices[found] = static_cast<int32_t>(at);
      values[found] = acc[at];
    }
  }
};

// What reaches the bound is marked first, a bit for each element, and collected chunk by chunk, while the chunk is
// in the nearest cache: a branch that is guessed wrongly would stop the stream from memory.
constexpr int64_t WORD = 64, WORDS = 64, CHUNK = WORD * WORDS;
using Marks = uint64_t[WORDS];

// acc += grad from begin to end, a chunk at most. Returns which words of the marks are not 0: only these are set.
template <Kind kind>
uint64_t mark_scalar(float* acc, const void* grad, int64_t begin, int64_t end, Key bound, Marks marks) {
  uint64_t some = 0;
  for (int64_t start = begin, word = 0; start < end; start += WORD, ++word) {
    const int64_t stop = std::min(start + WORD, end);
    int reached = 0;
    for (int64_t i = start; i < stop; ++i) {  // without a branch, so that compilers make vectors of it
      if (kind != NONE) acc[i] += load<kind>(grad, i);
      reached += key_of(acc[i]) >= bound;
    }
    if (!reached) continue;
    marks[word] = 0;
    for (int64_t i = start; i < stop; ++i) marks[word] |= uint64_t{key_of(acc[i]) >= bound} << (i - start);
    some |= uint64_t{1} << word;
  }
  return some;
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

// As mark_scalar, of a whole chunk.
template <Kind kind>
__attribute__((target("avx2,f16c"))) uint64_t mark_avx2(
    float* acc, const void* grad, int64_t begin, Key bound, Marks marks) {
  const __m256i magnitude = _mm256_set1_epi32(MAGNITUDE);
  // Keys are at most 0x7fffffff, so signed comparisons serve; a bound beyond is reached by none, one of 0 by all.
  const __m256i below = _mm256_set1_epi32(static_cast<int32_t>(std::min(bound, MAGNITUDE)) - 1);
  const uint64_t possible = bound > MAGNITUDE ? 0 : 0xff;
  uint64_t some = 0;
  for (int64_t word = 0; word < WORDS; ++word) {
    const int64_t start = begin + WORD * word;
    uint64_t reached = 0;
    for (int64_t lane = 0; lane < WORD; lane += 8) {
      __m256 sum = _mm256_loadu_ps(acc + start + lane);
      if (kind != NONE) {
        sum = _mm256_add_ps(sum, load8<kind>(grad, start + lane));
        _mm256_storeu_ps(acc + start + lane, sum);
      }
      const __m256i keys = _mm256_and_si256(_mm256_castps_si256(sum), magnitude);
      const int bits = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(keys, below)));
      reached |= (static_cast<uint64_t>(bits) & possible) << lane;
    }
    marks[word] = reached;
    some |= uint64_t{reached != 0} << word;
  }
  return some;
}

template <Kind kind>
__attribute__((target("avx512f"))) __m512 load16(const void* grad, int64_t i) {
  if (kind == FP32) return _mm512_loadu_ps(static_cast<const float*>(grad) + i);
  const __m256i narrow = _mm256_loadu_si256(
      reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(grad) + i));
  if (kind == FP16) return _mm512_cvtph_ps(narrow);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

// As mark_scalar, of a whole chunk.
template <Kind kind>
__attribute__((target("avx512f"))) uint64_t mark_avx512(
    float* acc, const void* grad, int64_t begin, Key bound, Marks marks) {
  const __m512i magnitude = _mm512_set1_epi32(MAGNITUDE), least = _mm512_set1_epi32(static_cast<int32_t>(bound));
  uint64_t some = 0;
  for (int64_t word = 0; word < WORDS; ++word) {
    const int64_t start = begin + WORD * word;
    uint64_t reached = 0;
    for (int64_t lane = 0; lane < WORD; lane += 16) {
      __m512 sum = _mm512_loadu_ps(acc + start + lane);
      if (kind != NONE) {
        sum = _mm512_add_ps(sum, load16<kind>(grad, start + lane));
        _mm512_storeu_ps(acc + start + lane, sum);
      }
      const __m512i keys = _mm512_and_si512(_mm512_castps_si512(sum), magnitude);
      reached |= static_cast<uint64_t>(_mm512_cmpge_epu32_mask(keys, least)) << lane;
    }
    marks[word] = reached;
    some |= uint64_t{reached != 0} << word;
  }
  return some;
}
#endif

template <Kind kind>
uint64_t mark(float* acc, const void* grad, int64_t begin, int64_t end, Key bound, int32_t level, Marks marks) {
#ifdef HAS_X86
  if (end - begin == CHUNK && level == AVX512) return mark_avx512<kind>(acc, grad, begin, bound, marks);
  if (end - begin == CHUNK && level == AVX2) return mark_avx2<kind>(acc, grad, begin, bound, marks);
#endif
  return mark_scalar<kind>(acc, grad, begin, end, bound, marks);
}

// acc += grad from begin to end; what reaches the bound is a candidate.
template <Kind kind>
void stream(float* acc, const void* grad, int64_t begin, int64_t end, Key bound, int32_t level, Candidates& out) {
  Marks marks;
  for (int64_t start = begin; start < end; start += CHUNK) {
    uint64_t some = mark<kind>(acc, grad, start, std::min(start + CHUNK, end), bound, level, marks);
    for (; some; some &= some - 1) {
      const int64_t word = __builtin_ctzll(some);
      out.add(acc, start + WORD * word, marks[word]);
    }
  }
}

int32_t best_level() {
#ifdef HAS_X86
  if (__builtin_cpu_supports("avx512f")) return AVX512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return AVX2;
#endif
  return SCALAR;
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
    found.push_back({indices + at * capacity, values + at * capacity, capacity});
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

// Radix selection, 11 + 11 + 9 bits: a pass over the spans for each.
struct Radix {
  int64_t left;  // the rank that is looked for, among keys that begin with the known bits
  Key known = 0, mask = 0;

  void narrow(const std::vector<Span>& spans, int shift, int bits) {
    const Key bins = 1u << bits;
    std::vector<int64_t> counts(bins, 0);
    for (const Span& span : spans)
      for (int64_t i = 0; i < span.count; ++i) {
        const Key key = key_of(span.values[i]);
        if ((key & mask) == known) ++counts[key >> shift & (bins - 1)];
      }
    Key bin = bins - 1;
    while (counts[bin] < left) left -= counts[bin--];
    known |= bin << shift;
    mask |= (bins - 1) << shift;
  }
};

Border border(const std::vector<Span>& spans, int64_t k) {
  Radix radix{k};
  radix.narrow(spans, 20, 11);
  radix.narrow(spans, 9, 11);
  radix.narrow(spans, 0, 9);
  return {radix.known, radix.left};
}

void emit(const std::vector<Span>& spans, Border at, int64_t k, int32_t* indices, float* values) {
  int64_t found = 0;
  for (const Span& span : spans)
    for (int64_t i = 0; i < span.count && found < k; ++i) {  // no other branch: every second would be guessed wrongly
      const Key key = key_of(span.values[i]);
      const bool tie = key == at.key && at.ties > 0;
      indices[found] = span.indices ? span.indices[i] : static_cast<int32_t>(i);
      values[found] = span.values[i];
      found += key > at.key || tie;
      at.ties -= tie;
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

Key sampled_bound(const float* acc, const void* grad, int32_t kind, int64_t n, Guess made) {
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
  Radix radix{made.rank};
  radix.narrow({{nullptr, sample.data(), made.sample}}, 20, 11);
  radix.narrow({{nullptr, sample.data(), made.sample}}, 9, 11);
  return radix.known;  // the last bits are as good as 0
}

// The first bits of the k-th magnitude.
Key counted_bound(const float* acc, int64_t n, int64_t k) {
  Radix radix{k};
  radix.narrow({{nullptr, acc, n}}, 20, 11);
  return radix.known;
}

// What a search found out.
struct Report {
  int64_t was_wrong;   // 1: fewer than k elements reached the guessed bound, or too many
  int64_t candidates;  // elements that reached the guess, where it was right
  int64_t bound;       // the one that was right, or -1: the whole sum was searched
};

enum Bound { GUESSED, COUNTED };  // in the order in which they are tried

// One search for the k largest of acc + grad.
struct Search {
  float* acc;
  const void* grad;
  int32_t kind;  // NONE: the gradient has been added
  int64_t n, k;
  int32_t level;
  int64_t threads;
  int32_t* indices;  // of candidates: parts x capacity
  float* values;
  int64_t capacity;
  int64_t forced;                // a bound to take instead of a sampled one; negative: none
  std::vector<Span> spans = {};  // what reached the bound
  int64_t total = 0, most = 0;   // of these: all, and those of one part

  // acc += grad; what reaches the bound.
  void collect(Key bound) {
    const auto found = pass(acc, grad, kind, n, bound, level, threads, indices, values, capacity);
    kind = NONE;
    spans.clear();
    total = most = 0;
    for (const Candidates& one : found) {
      spans.push_back({one.indices, one.values, one.found});
      total += one.found;
      most = std::max(most, one.found);
    }
  }

  // A key that at least k elements reach, probably; of COUNTED certainly. Negative: there is none.
  int64_t bound(Bound by) {
    if (by == GUESSED && forced >= 0) return forced;
    if (by == GUESSED) {
      const Guess made = guess(n, k);
      return made.sample ? int64_t{sampled_bound(acc, grad, kind, n, made)} : -1;
    }
    if (kind != NONE) collect(NOTHING);
    return n >= UNSAMPLED && k > n / ROOM ? -1 : int64_t{counted_bound(acc, n, k)};
  }
};

}  // namespace

extern "C" {

int32_t sparsify_level() { return best_level(); }

int64_t sparsify_parts(int64_t n, int64_t threads) { return num_parts(n, threads); }

// Candidates that each part has room for in `sparsify_topk`.
int64_t sparsify_capacity(int64_t n, int64_t k, int64_t threads) {
  const Guess made = guess(n, k);
  if (!made.sample) return n < UNSAMPLED ? n : 0;
  const double share = 1.5 * static_cast<double>(made.rank) / static_cast<double>(made.sample);
  return std::min(n / num_parts(n, threads) + 16, static_cast<int64_t>(share * static_cast<double>(n)) + 4096);
}

// acc (n) += grad (n); the k largest magnitudes into indices (k) and values (k), by ascending index. The candidate
// buffers have room for parts x capacity. `forced`: a bound to take instead of a sampled one, unless it is negative.
// Returns 0; or the capacity to call it with again, without gradient, and with the reported bound as `forced`.
int64_t sparsify_topk(
    float* acc, const void* grad, int32_t kind, int64_t n, int64_t k, int32_t level, int64_t threads,
    int32_t* candidate_indices, float* candidate_values, int64_t capacity, int64_t forced, int32_t* indices,
    float* values, Report* report) {
  Search search{acc, grad, kind, n, k, level, threads, candidate_indices, candidate_values, capacity, forced};
  *report = {0, 0, -1};
  if (!k) {
    search.collect(NOTHING);
    return 0;
  }
  for (const Bound by : {GUESSED, COUNTED}) {
    const int64_t bound = search.bound(by);
    if (bound < 0) continue;
    search.collect(static_cast<Key>(bound));
    const bool enough = search.total >= k, fits = search.most <= capacity;
    report->was_wrong |= by == GUESSED && !(enough && fits);
    if (!enough || (!fits && search.total > n / ROOM)) continue;
    report->bound = bound;
    if (!fits) return search.most;
    report->candidates = by == GUESSED ? search.total : 0;
    break;
  }
  if (report->bound < 0) search.spans = {{nullptr, acc, n}};
  emit(search.spans, border(search.spans, k), k, indices, values);
  return 0;
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
