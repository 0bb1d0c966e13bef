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
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_X86 1
#include <immintrin.h>
#endif

namespace {

using Key = uint32_t;
constexpr Key MAGNITUDE_MASK = 0x7fffffffu;
constexpr int64_t MAX_BLOCKS = 256;
constexpr int64_t MIN_NUMEL_PER_THREAD = 1 << 19;  // fewer elements than this are not worth a thread
constexpr int64_t MAX_UNSAMPLED = 1 << 10;   // so few elements are looked through without a guess
constexpr int64_t MAX_SAMPLE = 1 << 16;
constexpr int64_t CACHE_NUMEL = 1 << 22;  // elements, 16 MB: about what a core has of its caches
constexpr int64_t MIN_SAMPLE_SPACING = 128;  // one of so many elements is sampled: places far apart are slow to read
constexpr int64_t SUFFICIENT_HITS = 256;  // so many of the k largest within it tell their border well enough
constexpr int64_t MAX_CACHED = 1 << 17;  // so few elements are near, and a second pass over them is cheap
constexpr int64_t MAX_COMPARED = 1 << 12;  // up to so many are compared 31 times, more are counted in 2,048 bins
constexpr int64_t CAPACITY_DIVISOR = 8;  // beyond 1/8 of all elements candidates are not collected
constexpr Key UNREACHABLE_KEY = 0xffffffffu;  // a bound that nothing reaches
constexpr int64_t RUN_NUMEL = 8;  // elements in a row of the sample: half a cache line
constexpr int64_t PREFETCH_DISTANCE = 32;  // elements of a selection that are fetched before they are written to
constexpr int64_t VECTOR_NUMEL = 16;  // floats of a vector

// Of the gradient; NONE: there is nothing to add. DRIFT, of chunks: an anchor less parameters, which become the anchor.
enum Kind : int32_t { NONE, FP32, BF16, FP16, DRIFT };
enum Level : int32_t { SCALAR, AVX2, AVX512 };

Key key_of(float value) {
  Key bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits & MAGNITUDE_MASK;
}

float float_from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

float float_from_half(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 0x1f, mantissa = half & 0x3ffu;
  if (exponent == 0x1f) return float_from_bits(sign | 0x7f800000u | mantissa << 13);
  if (exponent) return float_from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
  const float small = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // 2^-24
  return sign ? -small : small;
}

template <Kind kind>
float load(const void* grad, int64_t i) {
  if (kind == FP32) return static_cast<const float*>(grad)[i];
  if (kind == BF16) return float_from_bits(uint32_t{static_cast<const uint16_t*>(grad)[i]} << 16);
  return float_from_half(static_cast<const uint16_t*>(grad)[i]);
}

float load_any(const void* grad, int32_t kind, int64_t i) {
  return kind == FP32 ? load<FP32>(grad, i) : kind == BF16 ? load<BF16>(grad, i) : load<FP16>(grad, i);
}

// Elements that one thread found, in the order of their indices. It counts on when it is full.
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

// What reaches the bound is marked first, a bit for each element, and collected strip by strip, while the strip is
// in the nearest cache: a branch that is guessed wrongly would stop the stream from memory.
constexpr int64_t MARKS_PER_WORD = 64, WORDS_PER_STRIP = 64, STRIP = MARKS_PER_WORD * WORDS_PER_STRIP;
using Marks = uint64_t[WORDS_PER_STRIP];

// acc += grad from begin to end, a strip at most. Returns which words of the marks are not 0: only these are set.
template <Kind kind>
uint64_t mark_scalar(float* acc, const void* grad, int64_t begin, int64_t end, Key bound, Marks marks) {
  uint64_t some = 0;
  for (int64_t start = begin, word = 0; start < end; start += MARKS_PER_WORD, ++word) {
    const int64_t stop = std::min(start + MARKS_PER_WORD, end);
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

// As mark_scalar, of a whole strip.
template <Kind kind>
__attribute__((target("avx2,f16c"))) uint64_t mark_avx2(
    float* acc, const void* grad, int64_t begin, Key bound, Marks marks) {
  const __m256i magnitude = _mm256_set1_epi32(MAGNITUDE_MASK);
  // Keys are at most 0x7fffffff, so signed comparisons serve; a bound beyond is reached by none, one of 0 by all.
  const __m256i below = _mm256_set1_epi32(static_cast<int32_t>(std::min(bound, MAGNITUDE_MASK)) - 1);
  const uint64_t possible = bound > MAGNITUDE_MASK ? 0 : 0xff;
  uint64_t some = 0;
  for (int64_t word = 0; word < WORDS_PER_STRIP; ++word) {
    const int64_t start = begin + MARKS_PER_WORD * word;
    uint64_t reached = 0;
    for (int64_t lane = 0; lane < MARKS_PER_WORD; lane += 8) {
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

// As mark_scalar, of a whole strip.
template <Kind kind>
__attribute__((target("avx512f"))) uint64_t mark_avx512(
    float* acc, const void* grad, int64_t begin, Key bound, Marks marks) {
  const __m512i magnitude = _mm512_set1_epi32(MAGNITUDE_MASK), least = _mm512_set1_epi32(static_cast<int32_t>(bound));
  uint64_t some = 0;
  for (int64_t word = 0; word < WORDS_PER_STRIP; ++word) {
    const int64_t start = begin + MARKS_PER_WORD * word;
    uint64_t reached = 0;
    for (int64_t lane = 0; lane < MARKS_PER_WORD; lane += 16) {
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
uint64_t mark_reached(float* acc, const void* grad, int64_t begin, int64_t end, Key bound, int32_t level, Marks marks) {
#ifdef HAS_X86
  if (end - begin == STRIP && level == AVX512) return mark_avx512<kind>(acc, grad, begin, bound, marks);
  if (end - begin == STRIP && level == AVX2) return mark_avx2<kind>(acc, grad, begin, bound, marks);
#endif
  return mark_scalar<kind>(acc, grad, begin, end, bound, marks);
}

// acc += grad from begin to end; what reaches the bound is a candidate.
template <Kind kind>
void accumulate_and_collect(
    float* acc, const void* grad, int64_t begin, int64_t end, Key bound, int32_t level, Candidates& out) {
  Marks marks;
  for (int64_t start = begin; start < end; start += STRIP) {
    uint64_t some = mark_reached<kind>(acc, grad, start, std::min(start + STRIP, end), bound, level, marks);
    for (; some; some &= some - 1) {
      const int64_t word = __builtin_ctzll(some);
      out.add(acc, start + MARKS_PER_WORD * word, marks[word]);
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

void accumulate_and_collect_any(
    float* acc, const void* grad, int32_t kind, int64_t begin, int64_t end, Key bound, int32_t level, Candidates& out) {
  switch (kind) {
    case FP32: return accumulate_and_collect<FP32>(acc, grad, begin, end, bound, level, out);
    case BF16: return accumulate_and_collect<BF16>(acc, grad, begin, end, bound, level, out);
    case FP16: return accumulate_and_collect<FP16>(acc, grad, begin, end, bound, level, out);
    default: return accumulate_and_collect<NONE>(acc, grad, begin, end, bound, level, out);
  }
}

int64_t num_blocks(int64_t n, int64_t threads) {
  return std::max<int64_t>(1, std::min({threads, MAX_BLOCKS, n / MIN_NUMEL_PER_THREAD}));
}

// Where block `at` of `blocks` begins: at whole cache lines, so that no two threads write to one.
int64_t block_start(int64_t n, int64_t blocks, int64_t at) { return at == blocks ? n : n / blocks * at / 16 * 16; }

// work(0), ..., work(blocks - 1), each in a thread of its own, where that can be had.
template <typename Work>
void run_in_threads(int64_t blocks, const Work& work) {
  if (blocks == 1) return work(0);
  std::vector<std::thread> others;
  for (int64_t at = 1; at < blocks; ++at) {
    try {
      others.emplace_back(work, at);
    } catch (const std::system_error&) {  // no more threads can be had: then this one does it
      work(at);
    }
  }
  work(0);
  for (auto& other : others) other.join();
}

int64_t size_of(int32_t kind) { return kind == BF16 || kind == FP16 ? 2 : 4; }

// Elements from `start` on, up to `end`, of a bucket, and their gradient. The pieces of a bucket follow each other.
struct Piece {
  float* acc;
  const void* grad;
  int64_t start, end;

  // As if the bucket's first element were here too, so that an element has the same index as in the bucket.
  float* acc_from_first() const {
    return reinterpret_cast<float*>(reinterpret_cast<uintptr_t>(acc) - start * sizeof(float));
  }
  const void* grad_from_first(int32_t kind) const {
    return reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(grad) - start * size_of(kind));
  }
};

// What is summed and searched; of kind NONE the gradient has been added.
struct Bucket {
  const Piece *pieces, *end;
  int32_t kind;
  int64_t n;
};

// The whole pass, in as many threads. Their blocks follow each other in the order of indices.
std::vector<Candidates> collect_in_threads(
    const Bucket& bucket, Key bound, int32_t level, int64_t threads, int32_t* indices, float* values,
    int64_t capacity) {
  const int64_t blocks = num_blocks(bucket.n, threads);
  std::vector<Candidates> found;
  for (int64_t at = 0; at < blocks; ++at)
    found.push_back({indices + at * capacity, values + at * capacity, capacity});
  run_in_threads(blocks, [&](int64_t at) {
    Candidates own = found[at];  // lest two threads count in one cache line
    const int64_t first = block_start(bucket.n, blocks, at), last = block_start(bucket.n, blocks, at + 1);
    for (const Piece* piece = bucket.pieces; piece != bucket.end; ++piece) {
      const int64_t begin = std::max(first, piece->start), end = std::min(last, piece->end);
      if (begin >= end) continue;
      const void* grad = piece->grad_from_first(bucket.kind);
      accumulate_and_collect_any(piece->acc_from_first(), grad, bucket.kind, begin, end, bound, level, own);
    }
    found[at] = own;
  });
  return found;
}

// Elements in the order of their indices; without `indices`, they are first, first + 1, ...
struct CandidateSpan {
  const int32_t* indices;
  const float* values;
  int64_t count, first = 0;
};

struct BorderKey {
  Key key;       // of the k-th largest magnitude
  int64_t ties;  // how many of this very key are among the first k
};

// Radix selection, 11 + 11 + 9 bits: a pass over the spans for each.
struct RadixSelect {
  int64_t left;  // the rank that is looked for, among keys that begin with the known bits
  Key known = 0, mask = 0;

  void narrow(const std::vector<CandidateSpan>& spans, int shift, int bits) {
    const Key bins = 1u << bits;
    std::vector<int64_t> counts(bins, 0);
    for (const CandidateSpan& span : spans)
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

// How many of these keys reach a bound; of keys, which have 31 bits, a comparison with signs is right.
int64_t num_reaching(const int32_t* keys, int64_t count, int32_t bound) {
  int32_t reached = 0;
  for (int64_t i = 0; i < count; ++i) reached += keys[i] >= bound;
  return reached;
}

#ifdef HAS_X86
__attribute__((target("avx2"))) int64_t num_reaching_avx2(const int32_t* keys, int64_t count, int32_t bound) {
  int32_t reached = 0;
  for (int64_t i = 0; i < count; ++i) reached += keys[i] >= bound;
  return reached;
}

__attribute__((target("avx512f,popcnt"))) int64_t num_reaching_avx512(
    const int32_t* keys, int64_t count, int32_t bound) {
  const __m512i least = _mm512_set1_epi32(bound);
  int64_t reached = 0;
  for (int64_t i = 0; i < count; i += 16) {
    const __mmask16 here = count - i < 16 ? (1 << (count - i)) - 1 : 0xffff;
    const __m512i some = _mm512_maskz_loadu_epi32(here, keys + i);
    reached += __builtin_popcount(_mm512_mask_cmpge_epi32_mask(here, some, least));
  }
  return reached;
}
#endif

// The k-th largest of few keys, counted from 1, but for its last bits: bit by bit, the largest bound that k of them
// reach; or one below it that no more than k reach. Nothing is guessed wrongly, as branches of a partial sort are.
Key kth_largest(const std::vector<int32_t>& keys, int64_t k, int32_t level, int last_bits) {
  int32_t known = 0;
  for (int bit = 30; bit >= last_bits; --bit) {
    const int32_t bound = known | int32_t{1} << bit;
    const int64_t count = static_cast<int64_t>(keys.size());
    int64_t reached;
#ifdef HAS_X86
    if (level == AVX512) reached = num_reaching_avx512(keys.data(), count, bound);
    else if (level == AVX2) reached = num_reaching_avx2(keys.data(), count, bound);
    else
#endif
      reached = num_reaching(keys.data(), count, bound);
    if (reached >= k) known = bound;
    if (reached == k) break;  // long before the last bit, unless some are equal
  }
  return static_cast<Key>(known);
}

BorderKey find_border(const std::vector<CandidateSpan>& spans, int64_t k, int32_t level) {
  int64_t total = 0;
  for (const CandidateSpan& span : spans) total += span.count;
  if (total > MAX_COMPARED) {
    RadixSelect radix{k};
    radix.narrow(spans, 20, 11);
    radix.narrow(spans, 9, 11);
    radix.narrow(spans, 0, 9);
    return {radix.known, radix.left};
  }
  std::vector<int32_t> keys;
  keys.reserve(total);
  for (const CandidateSpan& span : spans)
    for (int64_t i = 0; i < span.count; ++i) keys.push_back(static_cast<int32_t>(key_of(span.values[i])));
  const Key key = kth_largest(keys, k, level, 0);
  const int32_t above = static_cast<int32_t>(key) + 1;  // of the largest key there is none
  return {key, key == MAGNITUDE_MASK ? k : k - num_reaching(keys.data(), total, above)};
}

// `base`: what the indices of a bucket are counted from.
void emit_largest(
    const std::vector<CandidateSpan>& spans, BorderKey at, int64_t k, int32_t base, int32_t* indices, float* values) {
  int64_t found = 0;
  for (const CandidateSpan& span : spans)
    for (int64_t i = 0; i < span.count && found < k; ++i) {  // no other branch: every second would be guessed wrongly
      const Key key = key_of(span.values[i]);
      const bool tie = key == at.key && at.ties > 0;
      indices[found] = base + (span.indices ? span.indices[i] : static_cast<int32_t>(span.first + i));
      values[found] = span.values[i];
      found += key > at.key || tie;
      at.ties -= tie;
    }
}

struct SamplePlan {
  int64_t sample;  // elements looked at; 0: no guess is made
  int64_t rank;    // of the sample, counted from its largest, that serves as the bound
};

// The sample's r S-th largest would be right on average. Further down by four standard deviations, of twice the
// variance because neighbours resemble each other, which makes a sample of runs as good as one of fewer elements.
SamplePlan plan_sample(int64_t n, int64_t k) {
  if (n < MAX_UNSAMPLED) return {0, 0};
  const int64_t enough = k ? std::max(MAX_UNSAMPLED, SUFFICIENT_HITS * n / k) : MAX_SAMPLE;
  const int64_t most = std::max(n / MIN_SAMPLE_SPACING, std::min(n / 16, MAX_UNSAMPLED));
  const int64_t sample = std::min({MAX_SAMPLE, most, enough}) / RUN_NUMEL * RUN_NUMEL;
  const double expected = static_cast<double>(k) / static_cast<double>(n) * static_cast<double>(sample);
  const double margin = n < MAX_CACHED ? 3 * std::sqrt(expected) + 3 : 6 * std::sqrt(expected) + 8;
  const int64_t rank = static_cast<int64_t>(expected + margin);
  return rank > sample / 2 ? SamplePlan{0, 0} : SamplePlan{sample, rank};
}

constexpr int ROUGH_BITS = 9;  // bits that do not matter to a guess

Key sampled_bound(const Bucket& bucket, SamplePlan made, int32_t level) {
  std::vector<float> sample(made.sample);
  const int64_t runs = made.sample / RUN_NUMEL, stride = bucket.n / runs;
  const Piece* piece = bucket.pieces;
  for (int64_t run = 0; run < runs; ++run) {
    // Somewhere within its stride, by a hash: a fixed place would always meet the same place of a layer's rows.
    const uint64_t mixed = (static_cast<uint64_t>(run) + 1) * 0x9E3779B97F4A7C15u;
    const uint64_t num_places = static_cast<uint64_t>(stride - RUN_NUMEL + 1);
    const int64_t start = run * stride + static_cast<int64_t>((mixed >> 33) % num_places);
    for (int64_t i = start; i < start + RUN_NUMEL; ++i) {
      while (i >= piece->end) ++piece;
      const float owed = piece->acc[i - piece->start];
      const bool is_added = bucket.kind == NONE;
      const int64_t at = i - piece->start;
      sample[run * RUN_NUMEL + i - start] = is_added ? owed : owed + load_any(piece->grad, bucket.kind, at);
    }
  }
  if (made.sample <= MAX_COMPARED) {
    std::vector<int32_t> keys(made.sample);
    std::transform(sample.begin(), sample.end(), keys.begin(), key_of);
    return kth_largest(keys, made.rank, level, ROUGH_BITS);
  }
  RadixSelect radix{made.rank};
  radix.narrow({{nullptr, sample.data(), made.sample}}, 20, 11);
  radix.narrow({{nullptr, sample.data(), made.sample}}, 9, 11);
  return radix.known;  // the last bits are as good as 0
}

// The first bits of the k-th magnitude.
Key counted_bound(const std::vector<CandidateSpan>& spans, int64_t k) {
  RadixSelect radix{k};
  radix.narrow(spans, 20, 11);
  return radix.known;
}

// Counts of all searches together.
struct SearchCounts {
  int64_t wrong;       // searches in which fewer than k elements reached the guessed bound, or too many
  int64_t candidates;  // elements that reached a guess that was right
  int64_t selected;    // of these
};

enum BoundKind { GUESSED, COUNTED };  // in the order in which they are tried

// Candidates that each block has room for.
int64_t capacity_for(int64_t n, int64_t k, int64_t threads) {
  const SamplePlan made = plan_sample(n, k);
  if (!made.sample) return n < MAX_UNSAMPLED ? n : 0;
  const double share = 1.5 * static_cast<double>(made.rank) / static_cast<double>(made.sample);
  return std::min(n / num_blocks(n, threads) + 16, static_cast<int64_t>(share * static_cast<double>(n)) + 4096);
}

// One search for the k largest of acc + grad.
struct BucketSearch {
  Bucket bucket;
  int64_t k;
  int32_t level;
  int64_t threads;
  int64_t forced;  // a bound to take instead of a sampled one; negative: none
  int64_t capacity = 0;
  std::unique_ptr<int32_t[]> indices = nullptr;  // of candidates: blocks x capacity
  std::unique_ptr<float[]> values = nullptr;
  std::vector<CandidateSpan> spans = {};  // what reached the bound
  int64_t total = 0, most = 0;   // of these: all, and those of one block at most

  void make_room(int64_t size) {
    capacity = size;
    indices.reset(new int32_t[num_blocks(bucket.n, threads) * size]);
    values.reset(new float[num_blocks(bucket.n, threads) * size]);
  }

  // acc += grad; what reaches the bound.
  void collect(Key bound) {
    const auto found = collect_in_threads(bucket, bound, level, threads, indices.get(), values.get(), capacity);
    bucket.kind = NONE;
    spans.clear();
    total = most = 0;
    for (const Candidates& one : found) {
      spans.push_back({one.indices, one.values, one.found});
      total += one.found;
      most = std::max(most, one.found);
    }
  }

  // The whole sum.
  std::vector<CandidateSpan> all() const {
    std::vector<CandidateSpan> found;
    for (const Piece* piece = bucket.pieces; piece != bucket.end; ++piece)
      found.push_back({nullptr, piece->acc, piece->end - piece->start, piece->start});
    return found;
  }

  // A key that at least k elements reach, probably; of COUNTED certainly. Negative: there is none.
  int64_t bound(BoundKind by) {
    if (by == GUESSED && forced >= 0) return forced;
    if (by == GUESSED) {
      const SamplePlan made = plan_sample(bucket.n, k);
      return made.sample ? int64_t{sampled_bound(bucket, made, level)} : -1;
    }
    if (bucket.kind != NONE) collect(UNREACHABLE_KEY);
    return bucket.n < MAX_UNSAMPLED || k > bucket.n / CAPACITY_DIVISOR ? -1 : int64_t{counted_bound(all(), k)};
  }

  // The k largest, by ascending index.
  void run(int32_t base, int32_t* chosen, float* their_values, SearchCounts& report) {
    bool found = false;
    for (const BoundKind by : {GUESSED, COUNTED}) {
      const int64_t tried = k ? bound(by) : -1;
      if (tried < 0) continue;
      collect(static_cast<Key>(tried));
      const bool enough = total >= k, fits = most <= capacity;
      report.wrong += by == GUESSED && !(enough && fits);
      if (!enough || (!fits && total > bucket.n / CAPACITY_DIVISOR)) continue;
      if (!fits) {
        make_room(most + most / 4);
        collect(static_cast<Key>(tried));
      } else if (by == GUESSED) {
        report.candidates += total;
        report.selected += k;
      }
      found = true;
      break;
    }
    if (bucket.kind != NONE) collect(UNREACHABLE_KEY);
    if (!found) spans = all();
    if (k) emit_largest(spans, find_border(spans, k, level), k, base, chosen, their_values);
  }
};

// The sum of squares of x from begin to end, in lanes that are added in a fixed order.
template <Kind kind>
double squares_scalar(const void* x, int64_t begin, int64_t end) {
  float sums[VECTOR_NUMEL] = {};
  int64_t i = begin;
  for (; i + VECTOR_NUMEL <= end; i += VECTOR_NUMEL)
    for (int64_t lane = 0; lane < VECTOR_NUMEL; ++lane) sums[lane] += load<kind>(x, i + lane) * load<kind>(x, i + lane);
  double total = 0;
  for (; i < end; ++i) total += static_cast<double>(load<kind>(x, i)) * load<kind>(x, i);
  for (const float sum : sums) total += sum;
  return total;
}

#ifdef HAS_X86
template <Kind kind>
__attribute__((target("avx2,f16c"))) double squares_avx2(const void* x, int64_t begin, int64_t end) {
  __m256 sums[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
  int64_t i = begin;
  for (; i + 32 <= end; i += 32)
    for (int64_t at = 0; at < 4; ++at) {
      const __m256 here = load8<kind>(x, i + 8 * at);
      sums[at] = _mm256_add_ps(sums[at], _mm256_mul_ps(here, here));
    }
  float lanes[32];
  for (int64_t at = 0; at < 4; ++at) _mm256_storeu_ps(lanes + 8 * at, sums[at]);
  double total = squares_scalar<kind>(x, i, end);
  for (const float lane : lanes) total += lane;
  return total;
}

template <Kind kind>
__attribute__((target("avx512f"))) double squares_avx512(const void* x, int64_t begin, int64_t end) {
  __m512 sums[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
  int64_t i = begin;
  for (; i + 64 <= end; i += 64)
    for (int64_t at = 0; at < 4; ++at) {
      const __m512 here = load16<kind>(x, i + 16 * at);
      sums[at] = _mm512_add_ps(sums[at], _mm512_mul_ps(here, here));
    }
  float lanes[64];
  for (int64_t at = 0; at < 4; ++at) _mm512_storeu_ps(lanes + 16 * at, sums[at]);
  double total = squares_scalar<kind>(x, i, end);
  for (const float lane : lanes) total += lane;
  return total;
}
#endif

template <Kind kind>
double squares(const void* x, int64_t begin, int64_t end, int32_t level) {
#ifdef HAS_X86
  if (level == AVX512) return squares_avx512<kind>(x, begin, end);
  if (level == AVX2) return squares_avx2<kind>(x, begin, end);
#endif
  return squares_scalar<kind>(x, begin, end);
}

double squares_any(const void* x, int32_t kind, int64_t begin, int64_t end, int32_t level) {
  switch (kind) {
    case FP32: return squares<FP32>(x, begin, end, level);
    case BF16: return squares<BF16>(x, begin, end, level);
    default: return squares<FP16>(x, begin, end, level);
  }
}

// Elements from `start` up to `end` of a space: memories follow each other.
struct Memory {
  float* at;
  int64_t start, end;
};

// Elements of a space, no two alike.
struct Selection {
  const int32_t* indices;
  const float* values;
  int64_t count;
};

// 0 everywhere. More than caches hold goes past them: else each line would be read before it is written.
void clear(const Memory* memories, int64_t num_memories) {
  const Memory* const end = memories + num_memories;
  const int64_t n = end[-1].end - memories->start;
  for (const Memory* one = memories; one != end; ++one) {
    float *at = one->at, *const last = at + (one->end - one->start);
#ifdef HAS_X86
    if (n > CACHE_NUMEL) {
      for (; at != last && reinterpret_cast<uintptr_t>(at) % sizeof(__m128); ++at) *at = 0;
      for (; last - at >= 4; at += 4) _mm_stream_ps(at, _mm_setzero_ps());
    }
#endif
    std::fill(at, last, 0.0f);
  }
#ifdef HAS_X86
  _mm_sfence();
#endif
}

// act(memory, place in it, i) for the i-th element of the selection.
template <typename Do>
void for_each_element(const Memory* memories, int64_t num_memories, const Selection& selection, const Do& act) {
  const Memory *now = memories, *const end = memories + num_memories;
  for (int64_t i = 0; i < selection.count; ++i) {
    const int64_t index = selection.indices[i];
    if (index < now->start || index >= now->end)  // rare: indices mostly ascend
      now = std::upper_bound(memories, end, index, [](int64_t at, const Memory& one) { return at < one.end; });
    act(*now, index - now->start, i);
  }
}

// Equal chunks of a matrix, of height x width, `across` of them side by side, in `down` rows. Of each chunk k
// elements are looked for; they are written from `out` on, chunk by chunk, with the first one's index counted as
// `base`.
struct ChunkGrid {
  float* acc;
  char* grad;           // of whatever kind; of DRIFT the parameters
  const float* anchor;  // of DRIFT
  int64_t base, columns, height, width, down, across, k, out;
};

// A stretch: to = acc <- weight x acc + grad, each rounded.
template <Kind kind>
inline __attribute__((always_inline)) void accumulate(
    float* __restrict to, float* __restrict acc, char* __restrict grad, const float* __restrict anchor, float weight,
    int64_t width) {
  if (kind == DRIFT) {
    float* __restrict own = reinterpret_cast<float*>(grad);
    for (int64_t i = 0; i < width; ++i) {
      to[i] = acc[i] = weight * acc[i] + (anchor[i] - own[i]);
      own[i] = anchor[i];
    }
  } else if (kind == NONE) {
    for (int64_t i = 0; i < width; ++i) to[i] = acc[i];
  } else {
    for (int64_t i = 0; i < width; ++i) to[i] = acc[i] = weight * acc[i] + load<kind>(grad, i);
  }
}

#ifdef HAS_X86
template <Kind kind>
__attribute__((target("avx2"))) void accumulate_avx2(
    float* to, float* acc, char* grad, const float* anchor, float weight, int64_t width) {
  accumulate<kind>(to, acc, grad, anchor, weight, width);
}

template <Kind kind>
__attribute__((target("avx512f"))) void accumulate_avx512(
    float* to, float* acc, char* grad, const float* anchor, float weight, int64_t width) {
  accumulate<kind>(to, acc, grad, anchor, weight, width);
}
#endif

constexpr int64_t MAX_ABREAST = 16;  // chunks that are read at once: 4 KB in a row of memory, 256 KB of a nearer cache
constexpr int64_t MAX_UNGUESSED = 512;  // elements of a chunk that are compared without a guess
constexpr Key GUESS_MARGIN = 1 << 21;  // a chunk's border less so much, 0.75 to 0.88 of its value, is the next guess

// The k largest of chunks of at most STRIP elements, one after the other, by one thread.
struct ChunkSearch {
  float weight;  // of the acc
  int32_t level;
  Key guess = UNREACHABLE_KEY;  // what probably more than k elements of the next chunk reach
  std::vector<CandidateSpan> spans = {CandidateSpan{}};
  int32_t places[STRIP + VECTOR_NUMEL], chosen[STRIP];
  float room[MAX_ABREAST * STRIP], rivals[STRIP + VECTOR_NUMEL];
  float* values = room;  // of the chunk that is searched

  // acc <- weight x acc + grad; the elements of chunks that lie side by side, chunk by chunk. Memory is read along its
  // rows: the rows of one chunk are far apart, and no processor would look for them by itself.
  template <Kind kind>
  void read(const ChunkGrid& grid, int64_t first, int64_t count) {
    auto add = accumulate<kind>;
#ifdef HAS_X86
    if (level == AVX512) add = accumulate_avx512<kind>;
    if (level == AVX2) add = accumulate_avx2<kind>;
#endif
    const int64_t width = grid.width;
    for (int64_t row = 0; row < grid.height; ++row)
      for (int64_t at = 0; at < count; ++at) {
        const int64_t begin = first + row * grid.columns + at * width;
        char* const grad = kind == NONE ? nullptr : grid.grad + begin * size_of(kind);
        const float* const anchor = kind == DRIFT ? grid.anchor + begin : nullptr;
        add(room + at * STRIP + row * width, grid.acc + begin, grad, anchor, weight, width);
      }
  }

  // The k largest of `count` chunks side by side, of which the first begins at `first` in its matrix.
  void run(const ChunkGrid& grid, int64_t first, int64_t count, int32_t kind, int32_t* indices, float* found) {
    switch (kind) {
      case FP32: read<FP32>(grid, first, count); break;
      case BF16: read<BF16>(grid, first, count); break;
      case FP16: read<FP16>(grid, first, count); break;
      case DRIFT: read<DRIFT>(grid, first, count); break;
      default: read<NONE>(grid, first, count);
    }
    for (int64_t at = 0; at < count; ++at) {
      values = room + at * STRIP;
      search(grid, first + at * grid.width, indices + at * grid.k, found + at * grid.k);
    }
  }

#ifdef HAS_X86
  // Without a branch, for it would be guessed wrongly as often as not.
  __attribute__((target("avx512f,popcnt"))) int64_t collect_avx512(Key bound) {
    const __m512i magnitude = _mm512_set1_epi32(MAGNITUDE_MASK), least = _mm512_set1_epi32(static_cast<int32_t>(bound));
    const __m512i step = _mm512_set1_epi32(VECTOR_NUMEL);
    __m512i here = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    int64_t found = 0;
    for (int64_t at = 0; at < STRIP; at += VECTOR_NUMEL) {
      const __m512i bits = _mm512_loadu_si512(values + at);
      const __mmask16 some = _mm512_cmpge_epu32_mask(_mm512_and_si512(bits, magnitude), least);
      _mm512_storeu_si512(rivals + found, _mm512_maskz_compress_epi32(some, bits));
      _mm512_storeu_si512(places + found, _mm512_maskz_compress_epi32(some, here));
      found += __builtin_popcount(some);
      here = _mm512_add_epi32(here, step);
    }
    return found;
  }

  // As `emit`: of the first `total` rivals those from the border on, and their places, in the place of all.
  __attribute__((target("avx512f,popcnt"))) void emit_avx512(BorderKey border, int64_t total) {
    const __m512i magnitude = _mm512_set1_epi32(MAGNITUDE_MASK);
    const __m512i least = _mm512_set1_epi32(static_cast<int32_t>(border.key));
    int64_t found = 0;
    for (int64_t at = 0; at < total; at += VECTOR_NUMEL) {
      const __mmask16 there = total - at < VECTOR_NUMEL ? (1 << (total - at)) - 1 : 0xffff;
      const __m512i bits = _mm512_loadu_si512(rivals + at), here = _mm512_loadu_si512(places + at);
      const __m512i keys = _mm512_and_si512(bits, magnitude);
      uint32_t some = _mm512_mask_cmpgt_epu32_mask(there, keys, least);
      for (uint32_t ties = _mm512_mask_cmpeq_epu32_mask(there, keys, least); ties && border.ties; ties &= ties - 1)
        some |= ties & -ties, --border.ties;
      _mm512_storeu_si512(rivals + found, _mm512_maskz_compress_epi32(some, bits));
      _mm512_storeu_si512(places + found, _mm512_maskz_compress_epi32(some, here));
      found += __builtin_popcount(some);
    }
  }
#endif

  // What reaches the bound, by ascending place.
  int64_t collect(int64_t size, Key bound) {
#ifdef HAS_X86
    if (level == AVX512) {
      int64_t found = collect_avx512(bound);
      while (found && places[found - 1] >= size) --found;  // zeros that fill the row
      return found;
    }
#endif
    Marks marks;
    int64_t found = 0;
    uint64_t some = mark_reached<NONE>(values, nullptr, 0, STRIP, bound, level, marks);
    for (; some; some &= some - 1) {
      const int64_t word = __builtin_ctzll(some);
      for (uint64_t left = marks[word]; left; left &= left - 1) {
        const int64_t place = MARKS_PER_WORD * word + __builtin_ctzll(left);
        if (place >= size) break;
        places[found] = static_cast<int32_t>(place);
        rivals[found++] = values[place];
      }
    }
    return found;
  }

  Key rough_bound(int64_t size, int64_t k) const {
    std::vector<int32_t> keys(size);
    for (int64_t i = 0; i < size; ++i) keys[i] = static_cast<int32_t>(key_of(values[i]));
    return kth_largest(keys, k, level, ROUGH_BITS);
  }

  void search(const ChunkGrid& grid, int64_t first, int32_t* indices, float* found) {
    const int64_t size = grid.height * grid.width, k = grid.k;
    const bool is_small = size <= MAX_UNGUESSED || k > size / 2;
    int64_t total = 0;
    if (!is_small) {
      std::fill(values + size, values + STRIP, 0.0f);
      if (guess != UNREACHABLE_KEY) total = collect(size, guess);
      if (total < k || total > size / CAPACITY_DIVISOR + k) total = collect(size, rough_bound(size, k));
    }
    spans[0] = is_small ? CandidateSpan{nullptr, values, size, 0} : CandidateSpan{places, rivals, total, 0};
    const BorderKey at = find_border(spans, k, level);
    const int32_t* inside = chosen;
#ifdef HAS_X86
    if (level == AVX512 && !is_small) {
      emit_avx512(at, total);
      std::memcpy(found, rivals, k * sizeof(float));
      inside = places;
    } else
#endif
      emit_largest(spans, at, k, 0, chosen, found);
    // The row of a place is place / width; a product is the same, for places are less than 2^12, and faster.
    const uint32_t width = static_cast<uint32_t>(grid.width), inverse = ((1u << 24) + width - 1) / width;
    const int64_t base = grid.base + first, skipped = grid.columns - grid.width;
    for (int64_t i = 0; i < k; ++i) {
      const int64_t row = int64_t{inside[i]} * inverse >> 24;
      indices[i] = static_cast<int32_t>(base + inside[i] + row * skipped);
    }
    if (!is_small) guess = at.key > GUESS_MARGIN ? at.key - GUESS_MARGIN : UNREACHABLE_KEY;
  }
};

}  // namespace

extern "C" {

int32_t sparsify_level() { return best_level(); }

int64_t sparsify_num_blocks(int64_t n, int64_t threads) { return num_blocks(n, threads); }

// The address and length of a tensor.
struct TensorSpan {
  void* at;
  int64_t n;
};

// A bucket of n elements, k of which are looked for. Their indices are counted from `base`, and written from `out` on.
// `room`: for so many candidates of each block there is room at least; it grows where more were found than there was
// room for.
struct SearchRequest {
  int64_t n, k, base, out, room;
};

int64_t total(const TensorSpan* tensors, int64_t count) {
  int64_t n = 0;
  for (const TensorSpan* one = tensors; one != tensors + count; ++one) n += one->n;
  return n;
}

// Tensors that follow each other, read stretch by stretch.
struct TensorReader {
  const TensorSpan* now;
  int64_t width, done = 0;  // bytes of an element; elements of this tensor

  int64_t left() {
    while (done == now->n) ++now, done = 0;
    return now->n - done;
  }
  char* take(int64_t size) {
    done += size;
    return static_cast<char*>(now->at) + (done - size) * width;
  }
};

// Of each bucket acc (n) += grad (n); the k largest magnitudes into indices and values, by ascending index. The accs of
// all buckets are tensors that follow each other, and so are the gradients, if there are any to add. `forced`: a bound
// to take instead of a sampled one, unless it is negative. Returns 1 if these have not as many elements as the buckets;
// then nothing was done.
int32_t sparsify_topk(
    SearchRequest* buckets, int64_t count, const TensorSpan* accs, int64_t num_accs, const TensorSpan* grads,
    int64_t num_grads, int32_t kind, int32_t level, int64_t threads, int64_t forced, int32_t* indices, float* values,
    SearchCounts* report) {
  *report = {0, 0, 0};
  int64_t n = 0;
  for (const SearchRequest* one = buckets; one != buckets + count; ++one) n += one->n;
  if (total(accs, num_accs) != n || (num_grads && total(grads, num_grads) != n)) return 1;
  TensorReader acc{accs, sizeof(float)}, grad{grads, size_of(kind)};
  std::vector<Piece> pieces;
  for (SearchRequest* one = buckets; one != buckets + count; ++one) {
    pieces.clear();
    for (int64_t done = 0; done < one->n;) {
      const int64_t size = std::min({one->n - done, acc.left(), num_grads ? grad.left() : one->n});
      float* to = reinterpret_cast<float*>(acc.take(size));
      pieces.push_back({to, num_grads ? grad.take(size) : nullptr, done, done + size});
      done += size;
    }
    const Bucket bucket{pieces.data(), pieces.data() + pieces.size(), num_grads ? kind : int32_t{NONE}, one->n};
    BucketSearch search{bucket, one->k, level, threads, forced};
    search.make_room(std::max(one->room, capacity_for(one->n, one->k, threads)));
    search.run(static_cast<int32_t>(one->base), indices + one->out, values + one->out, *report);
    one->room = search.capacity;
  }
  return 0;
}

// acc (n) += grad (n); how many of each block have a key of at least `bound` into counts (blocks), and these, as far as
// there is room, into the buffers.
void sparsify_above(
    float* acc, const void* grad, int32_t kind, int64_t n, uint32_t bound, int32_t level, int64_t threads,
    int32_t* candidate_indices, float* candidate_values, int64_t capacity, int64_t* counts) {
  const Piece whole{acc, grad, 0, n};
  const Bucket bucket{&whole, &whole + 1, kind, n};
  const auto found = collect_in_threads(bucket, bound, level, threads, candidate_indices, candidate_values, capacity);
  for (const Candidates& one : found) *counts++ = one.found;
}

// The space, cleared before if asked, += alpha x one selection after the other, each product rounded.
void sparsify_add(
    const Memory* memories, int64_t num_memories, const Selection* selections, int64_t num_selections, float alpha,
    int32_t clears) {
  if (clears) clear(memories, num_memories);
  for (const Selection* selection = selections; selection != selections + num_selections; ++selection)
    for_each_element(memories, num_memories, *selection, [&](const Memory& to, int64_t at, int64_t i) {
      to.at[at] += alpha * selection->values[i];
    });
}

// 0 wherever the only selection has elements.
void sparsify_clear_at(const Memory* memories, int64_t num_memories, const Selection* selection, int64_t) {
  for_each_element(memories, num_memories, *selection, [](const Memory& to, int64_t at, int64_t) { to.at[at] = 0; });
}

// Two equal spaces += rate x the sum of (alpha x each selection), with one rounding for `rate`, as torch's add has it.
// Returns 1, with nothing done, if a selection has not the elements of each memory before those of the next.
int32_t sparsify_move(
    const Memory* anchors, const Memory* owns, int64_t num_memories, const Selection* selections,
    int64_t num_selections, float alpha, float rate) {
  std::vector<std::vector<Selection>> of_memories(num_memories);
  for (int64_t at = 0; at < num_selections; ++at) {
    Selection left = selections[at];
    for (int64_t memory = 0; memory < num_memories; ++memory) {
      int64_t count = 0;
      const auto [_, start, end] = anchors[memory];
      while (count < left.count && left.indices[count] >= start && left.indices[count] < end) ++count;
      of_memories[memory].push_back({left.indices, left.values, count});
      left = {left.indices + count, left.values + count, left.count - count};
    }
    if (left.count) return 1;
  }
  for (int64_t memory = 0; memory < num_memories; ++memory) {
    const int64_t start = anchors[memory].start;
    const std::vector<Selection>& here = of_memories[memory];
    float *const anchor = anchors[memory].at, *const own = owns[memory].at;
    const auto each = [&](const auto& act) {
      for (const Selection& selection : here)
        for (int64_t i = 0; i < selection.count; ++i) act(selection.indices[i] - start, selection.values[i]);
    };
    if (num_selections == 1) {
      const Selection& selection = here[0];
      for (int64_t i = 0; i < selection.count; ++i) {
        const int64_t at = selection.indices[i] - start;
        const int64_t ahead = selection.indices[std::min(i + PREFETCH_DISTANCE, selection.count - 1)] - start;
        __builtin_prefetch(anchor + ahead, 1);
        __builtin_prefetch(own + ahead, 1);
        own[at] = anchor[at] = std::fma(rate, 0 + alpha * selection.values[i], anchor[at]);
      }
      continue;
    }
    // The sum is taken in the other space.
    each([&](int64_t at, float) { own[at] = 0; });
    each([&](int64_t at, float value) { own[at] += alpha * value; });
    each([&](int64_t at, float) { anchor[at] = std::fma(rate, own[at], anchor[at]), own[at] = 0; });  // each sum once
    each([&](int64_t at, float) { own[at] = anchor[at]; });
  }
  return 0;
}

// The Euclidean norm of each stretch of so many elements of tensors that follow each other, none of which ends within
// a stretch.
void sparsify_norms(
    const TensorSpan* tensors, const int64_t* sizes, int64_t count, int32_t kind, int32_t level, int64_t threads,
    float* norms) {
  TensorReader reader{tensors, size_of(kind)};
  for (int64_t at = 0; at < count; ++at) {
    const int64_t n = sizes[at], blocks = num_blocks(n, threads);
    if (n) reader.left();
    const char* from = n ? reader.take(n) : nullptr;
    double sums[MAX_BLOCKS] = {}, total = 0;
    run_in_threads(blocks, [&](int64_t block) {
      sums[block] = squares_any(from, kind, block_start(n, blocks, block), block_start(n, blocks, block + 1), level);
    });
    for (int64_t block = 0; block < blocks; ++block) total += sums[block];
    norms[at] = static_cast<float>(std::sqrt(total));
  }
}

// Statistical2 of sparsify.core.codes: of tensors that follow each other, so many values each, the means of the four
// bins and each value's bin. As torch's operators round it: sums in float one after the other, squares in double.
void sparsify_statistical2(const float* values, const int64_t* counts, int64_t num, float* means, uint8_t* codes) {
  for (const int64_t* count = counts; count != counts + num; values += *count, codes += *count, ++count) {
    const float number = static_cast<float>(*count);
    float sum = 0;
    for (int64_t i = 0; i < *count; ++i) sum += values[i];
    const float mean = sum / std::max(number, 1.0f);
    double squares = 0;
    for (int64_t i = 0; i < *count; ++i) {
      const double centred = values[i] - mean;
      squares += centred * centred;
    }
    const float deviation = static_cast<float>(std::sqrt(squares / std::max(number - 1.0f, 1.0f)));
    const float width = deviation > 0 ? 1.5f * deviation : 1.0f;
    for (int64_t i = 0; i < *count; ++i) {
      const float at = (values[i] - mean) / width + 2.0f;
      codes[i] = (at > 0.5f) + (at >= 1.5f) + (at > 2.5f);  // the nearest of 0 to 3, of two the even one
    }
    float sums[4] = {};
    int64_t inside[4] = {};
    for (int64_t i = 0; i < *count; ++i) sums[codes[i]] += values[i], ++inside[codes[i]];
    for (int bin = 0; bin < 4; ++bin)
      *means++ = sums[bin] / std::max(static_cast<float>(inside[bin]), 1.0f) + mean * 0.0f;
  }
}

// acc (n) <- weight x acc + grad (n), if there is one; the k largest magnitudes of each chunk, by ascending place.
// The chunks of all grids cover the n elements.
void sparsify_chunks(
    const ChunkGrid* grids, int64_t count, float weight, int32_t kind, int64_t n, int32_t level, int64_t threads,
    int32_t* indices, float* values) {
  int64_t rows = 0;
  for (const ChunkGrid* grid = grids; grid != grids + count; ++grid) rows += grid->down;
  const int64_t blocks = std::min(num_blocks(n, threads), std::max<int64_t>(rows, 1));
  run_in_threads(blocks, [&](int64_t block) {
    const std::unique_ptr<ChunkSearch> search(new ChunkSearch{weight, level});
    int64_t row = 0;
    const int64_t begin = rows * block / blocks, end = rows * (block + 1) / blocks;
    for (const ChunkGrid* grid = grids; grid != grids + count; row += grid->down, ++grid) {
      const int64_t from = std::max(begin - row, int64_t{0}), to = std::min(end - row, grid->down);
      for (int64_t down = from; down < to; ++down)
        for (int64_t across = 0; across < grid->across; across += MAX_ABREAST) {
          const int64_t first = down * grid->height * grid->columns + across * grid->width;
          const int64_t out = grid->out + (down * grid->across + across) * grid->k;
          search->run(*grid, first, std::min(MAX_ABREAST, grid->across - across), kind, indices + out, values + out);
        }
    }
  });
}
}
