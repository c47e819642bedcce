// Exact attention of one query token per request over listed pages, read in place.
//
// The listed tokens of a segment are cut into chunks; a chunk is a unit of work and its size depends on the number of
// tokens alone, so results do not depend on threads or on what else is in the batch. Each chunk gives a maximum, a sum
// of exponentials and a weighted sum of values; the chunks of a segment are merged in order.
#pragma once

#include "chunk.h"

namespace kvsieve {

// A unit's exponentials [group, stride] become probabilities by `factors` [group], reduced over the group [tokens].
inline void reduce_group(const Attention& a, const Unit& unit, const float* kept, const float* factors, float* to) {
  const int64_t tokens = unit.tokens(), stride = unit.stride();
  for (int64_t t = 0; t < tokens; t += LANES) {
    Floats total = load(kept + t) * factors[0];
    for (int64_t g = 1; g < a.group; ++g) {
      const Floats x = load(kept + g * stride + t) * factors[g];
      if (a.reduction == MAX)
        total = (x > total) | (x != x) ? x : total;  // a NaN stays one
      else
        total += x;
    }
    if (a.reduction == MEAN) total /= (float)a.group;
    std::memcpy(to + t, &total, std::min<int64_t>(LANES, tokens - t) * sizeof(float));
  }
}

// What the listed tokens of a segment received, in the places of its list; 0 where there is no token.
inline void give_mass(const Attention& a, int64_t segment, const std::vector<Unit>& units,
                      const std::vector<int64_t>& first, const float* partials, int64_t size, const float* kept) {
  const int64_t places = a.listed * a.page_size;
  float* to = a.mass + segment * places;
  int64_t tokens = 0;
  for (int64_t u = first[segment]; u < first[segment + 1]; ++u) {
    reduce_group(a, units[u], kept + units[u].kept, partials + u * size, to + units[u].first);
    tokens = units[u].last;
  }
  std::fill(to + tokens, to + places, 0.0f);
}

// Merges the chunks [first, last) of a segment, and its sink logit, into out and lse. Of each chunk the maxima become
// what its exponentials must be multiplied by to be probabilities.
template <class T>
void merge(const Attention& a, int64_t b, int64_t h, float* partials, int64_t size, int64_t first, int64_t last) {
  const int64_t padded_v = round_up(a.width_v);
  const float nothing = -std::numeric_limits<float>::infinity();
  std::vector<float> sums(padded_v);
  for (int64_t g = 0; g < a.group; ++g) {
    const float sink = a.sinks ? a.sinks[h * a.group + g] : nothing;
    float top = sink;
    for (int64_t c = first; c < last; ++c) top = std::max(top, partials[c * size + g]);
    const float shift = top == nothing ? 0.0f : top;
    float total = sink == nothing ? 0.0f : std::exp(sink - shift);
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (int64_t c = first; c < last; ++c) {
      float* part = partials + c * size;
      const float weight = part[g] = std::exp(part[g] - shift);
      total += weight * part[a.group + g];
      const float* from = part + 2 * a.group + g * padded_v;
      for (int64_t d = 0; d < padded_v; ++d) sums[d] += weight * from[d];
    }
    for (int64_t c = first; c < last; ++c) partials[c * size + g] /= total;
    const int64_t row = (b * a.heads + h) * a.group + g;
    a.lse[row] = shift + std::log(total);
    for (int64_t d = 0; d < a.width_v; ++d) put((T*)a.out + row * a.width_v + d, sums[d] / total);
  }
}

// The units of all segments, in order; `first` [segments + 1]: of each segment. Returns the listed tokens.
inline int64_t cut(const Attention& a, std::vector<Unit>& units, std::vector<int64_t>& first) {
  int64_t read = 0, kept = 0;
  for (int64_t s = 0; s < a.batch * a.heads; ++s) {
    const int64_t tokens = listed_tokens(a, s / a.heads, s % a.heads);
    const int64_t chunk = tokens <= LONG_LIST ? SHORT_CHUNK : LONG_CHUNK;
    first.push_back((int64_t)units.size());
    for (int64_t t = 0; t < tokens; t += chunk) {
      units.push_back({s / a.heads, s % a.heads, t, std::min(t + chunk, tokens), kept});
      kept += a.group * units.back().stride();
    }
    read += tokens;
  }
  first.push_back((int64_t)units.size());
  return read;
}

// Grows and never shrinks: steps need much the same memory.
inline float* at_least(std::vector<float>& buffer, int64_t size) {
  if ((int64_t)buffer.size() < size) buffer.resize(size);
  return buffer.data();
}

// Returns the number of K/V tokens read.
template <class T>
int64_t attend(const Attention& a) {
  const int64_t size = a.group * (2 + round_up(a.width_v)), segments = a.batch * a.heads;
  std::vector<Unit> units;
  std::vector<int64_t> first;
  const int64_t read = cut(a, units, first), work = (int64_t)units.size();
  static thread_local std::vector<float> partials, exponentials;
  float* const partial = at_least(partials, work * size);
  const int64_t exponential_count = work ? units.back().kept + a.group * units.back().stride() : 0;
  float* const kept = a.mass ? at_least(exponentials, exponential_count) : nullptr;
#pragma omp parallel if (work > 1)
  {
    std::vector<float> scratch;
#pragma omp for schedule(dynamic, 1)
    for (int64_t u = 0; u < work; ++u)
      attend_unit<T>(a, units[u], scratch, partial + u * size, kept ? kept + units[u].kept : nullptr);
#pragma omp for schedule(static)
    for (int64_t s = 0; s < segments; ++s)
      merge<T>(a, s / a.heads, s % a.heads, partial, size, first[s], first[s + 1]);
#pragma omp for schedule(static)
    for (int64_t s = 0; s < (a.mass ? segments : 0); ++s) give_mass(a, s, units, first, partial, size, kept);
  }
  return read;
}

}  // namespace kvsieve
