// Up to TILES tiles at once, and vectors of samples turned into samples and back.

#pragma once
#include <utility>
#include "common.hpp"

constexpr int TILES = 128 / LANES, ROOM = LANES == 16 ? 16 : 8;  // ROOM: sums that fit the registers

#define INLINE __attribute__((always_inline))

template <class F, int... K>
static INLINE inline void each(F f, std::integer_sequence<int, K...>) { (f(std::integral_constant<int, K>{}), ...); }
#define PLACES(...) each(__VA_ARGS__, std::make_integer_sequence<int, 9>{})  // ky and kx as constants

// f(tiles at once, first tile) for all tiles: as many at once as possible
template <int MOST, class F>
static inline void blocks(int tiles, F f, int from = 0) {
    for (; from + MOST <= tiles; from += MOST) f(std::integral_constant<int, MOST>{}, from);
    if constexpr (MOST > 1) if (from < tiles) blocks<MOST / 2>(tiles, f, from);
}

// Every run of 2h lanes becomes the first halves of a's and b's run, or the second ones.
static INLINE inline V halves(V a, V b, int h, bool second) {
    I from;
    for (int l = 0; l < LANES; l++) from[l] = (l & h ? LANES + l - h : l) + (second ? h : 0);
#ifdef __clang__
    V both;
    for (int l = 0; l < LANES; l++) both[l] = l & h ? b[from[l] - LANES] : a[from[l]];
    return both;
#else
    return __builtin_shuffle(a, b, from);
#endif
}

template <int HALF>
static INLINE inline void add_halves(V *v) {
    EACH(j, HALF) v[j] = halves(v[j], v[j + HALF], HALF, false) + halves(v[j], v[j + HALF], HALF, true);
    if constexpr (HALF > 1) add_halves<HALF / 2>(v);
}

// The sums over the lanes of LANES vectors, as one vector.
static INLINE inline V sums_of(V *v) {
    add_halves<LANES / 2>(v);
    return v[0];
}

template <int HALF = LANES / 2>
static INLINE inline void transpose(V *v) {
    EACH(j, LANES) if (!(j & HALF)) {
        const V a = v[j], b = v[j + HALF];
        v[j] = halves(a, b, HALF, false), v[j + HALF] = halves(a, b, HALF, true);
    }
    if constexpr (HALF > 1) transpose<HALF / 2>(v);
}

// put(k, the k-th number of all samples, side by side) for k < n; a sample's numbers are contiguous, `step` apart.
template <class F>
static INLINE inline void each_number(const float *from, int step, int samples, int n, F put) {
    for (int k = 0; k < n; k += LANES) {
        const int here = n - k < LANES ? n - k : LANES;
        V v[LANES] = {};
        for (int l = 0; l < LANES && l < samples; l++) std::memcpy(&v[l], from + l * step + k, here * sizeof(float));
        transpose(v);
        for (int j = 0; j < here; j++) put(k + j, v[j]);
    }
}

// to[k] += the sum over the lanes of v[k]; v has room for a multiple of LANES
static void add_sums(V *v, int n, float *to) {
    for (int k = 0; k < n; k += LANES) {
        const V s = sums_of(v + k);
        for (int l = 0; l < LANES && k + l < n; l++) to[k + l] += s[l];
    }
}
