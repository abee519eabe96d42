// Linear layers, on up to TILES tiles.

#pragma once
#include "tiles.hpp"

// A linear layer, on vectors of TILES tiles per unit.
template <int O, int K>
struct Linear {
    static constexpr int MOST = O * K / 3, B = ROOM / 4, G = LANES / 4;  // with more taps the dense way is faster
    Tap taps[MOST + 1], back[MOST + 1];
    int tap[O + 1], backs[K + 2];  // where those of each output, and of each input, begin
    bool sparse, sparse_gradient;

    void read(const float *w, const float *wanted) {
        const float *also = wanted ? wanted : w;
        int all = 0, n = 0;
        for (int k = 0; k < O * K; k++) all += any(w + k, also + k);
        sparse = all <= MOST, sparse_gradient = sparse && wanted;
        if (!sparse) return;
        std::memset(backs, 0, sizeof backs);
        for (int o = 0; o < O; o++) {
            tap[o] = n;
            for (int k = 0; k < K; k++) {
                taps[n] = {k, w[o * K + k]};
                n += any(w + o * K + k, also + o * K + k);
            }
        }
        tap[O] = n;
        for (int t = 0; t < n; t++) backs[taps[t].at + 2]++;
        for (int k = 1; k <= K; k++) backs[k + 1] += backs[k];
        for (int o = 0; o < O; o++)
            for (int t = tap[o]; t < tap[o + 1]; t++) back[backs[taps[t].at + 1]++] = {o, taps[t].w};
    }

    // Whether one of two is not zero; a zero may have a sign.
    static bool any(const float *one, const float *other) {
        uint32_t bits[2];
        std::memcpy(bits, one, 4), std::memcpy(bits + 1, other, 4);
        return (bits[0] | bits[1]) << 1;
    }

    // out[o] = b[o] + Σ w[o][k] · in[k]
    void forward(const V *in, const float *w, const float *b, V *out, int tiles) const {
        if (sparse)
            blocks<ROOM / 2>(tiles, [&](auto n, int t) { gather<n, O>(taps, tap, in + t, b, out + t); });
        else
            blocks<B>(tiles, [&](auto n, int t) { dense<n, O, K, K, 1>(in + t, w, b, out + t); });
    }

    // din[k] = Σ d[o] · w[o][k]
    void input_gradient(const V *d, const float *w, V *din, int tiles) const {
        if (sparse)
            blocks<ROOM / 2>(tiles, [&](auto n, int t) { gather<n, K>(back, backs, d + t, nullptr, din + t); });
        else
            blocks<B>(tiles, [&](auto n, int t) { dense<n, K, O, 1, K>(d + t, w, nullptr, din + t); });
    }

    template <int T, int TO>
    static void gather(const Tap *taps, const int *begin, const V *in, const float *b, V *out) {
        for (int o = 0; o < TO; o++) {
            V sums[T];
            EACH(t, T) sums[t] = (b ? b[o] : 0) - V{};
            for (const Tap *tap = taps + begin[o]; tap < taps + begin[o + 1]; tap++) {
                const V *from = in + tap->at * TILES, w = tap->w - V{};
                EACH(t, T) sums[t] += from[t] * w;
            }
            EACH(t, T) out[o * TILES + t] = sums[t];
        }
    }

    template <int T, int TO, int FROM, int ROW, int COLUMN>
    static void dense(const V *in, const float *w, const float *b, V *out) {
        constexpr int AT_ONCE = ROOM / T < 8 ? ROOM / T : 8;
        for (int o = 0; o < TO; o += AT_ONCE) {
            V sums[AT_ONCE][T];
            const float *row[AT_ONCE];
            EACH(j, AT_ONCE) row[j] = w + (o + j < TO ? o + j : TO - 1) * ROW;
            EACH(j, AT_ONCE) EACH(t, T) sums[j][t] = (b ? b[o + j < TO ? o + j : TO - 1] : 0) - V{};
            for (int k = 0; k < FROM; k++)
                EACH(j, AT_ONCE) EACH(t, T) sums[j][t] += in[k * TILES + t] * row[j][k * COLUMN];
            EACH(j, AT_ONCE) if (o + j < TO) EACH(t, T) out[(o + j) * TILES + t] = sums[j][t];
        }
    }

    // dw[o][k] += Σ over the samples of d[o] · in[k]
    void gradient(const V *in, const V *d, int tiles, float *dw, float *db) const {
        for (int o = 0; o < O; o++) {
            V s = {};
            for (int t = 0; t < tiles; t++) s += d[o * TILES + t];
            db[o] += sum(s);
            if (sparse_gradient) of_taps(in, d + o * TILES, tiles, o, dw + o * K);
        }
        for (int o = 0; o < O && !sparse_gradient; o += G)
            for (int k = 0; k < K; k += 4) {
                V s[LANES] = {};
                const V *left[G], *right[4];
                EACH(j, G) left[j] = d + (o + j < O ? o + j : O - 1) * TILES;
                EACH(i, 4) right[i] = in + (k + i < K ? k + i : K - 1) * TILES;
                for (int t = 0; t < tiles; t++) EACH(j, G) EACH(i, 4) s[j * 4 + i] += left[j][t] * right[i][t];
                const V found = sums_of(s);
                float four[G][4];
                std::memcpy(four, &found, sizeof four);
                if (o + G <= O && k + 4 <= K)
                    EACH(j, G) EACH(i, 4) dw[(o + j) * K + k + i] += four[j][i];
                else
                    for (int j = 0; j < G && o + j < O; j++)
                        for (int i = 0; i < 4 && k + i < K; i++) dw[(o + j) * K + k + i] += four[j][i];
            }
    }

    void of_taps(const V *in, const V *d, int tiles, int o, float *dw) const {
        for (int first = tap[o]; first < tap[o + 1]; first += LANES) {
            V s[LANES] = {};
            const V *own[LANES];
            const int n = tap[o + 1] - first < LANES ? tap[o + 1] - first : LANES;
            EACH(j, LANES) own[j] = in + taps[j < n ? first + j : first].at * TILES;
            for (int t = 0; t < tiles; t++) EACH(j, LANES) s[j] += d[t] * own[j][t];
            const V found = sums_of(s);
            for (int j = 0; j < n; j++) dw[taps[first + j].at] += found[j];
        }
    }
};
