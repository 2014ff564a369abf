/* Optimizer updates on the CPU in one pass over memory. kernels.py says what is bitwise equal to torch.

   An update is split into chunks, and each thread takes the next chunk when it is done with one. So a thread that loses
   its CPU, to one that launches device work for example, delays no other. When no chunk is left, a thread continues
   with the update that was started next, or exits. It processes a chunk in blocks that stay in its first-level cache:
   gradient to fp32, the update, the copy of the parameter. Memory is touched once, and every loop is short enough for
   the compiler to vectorise.

   Compile with -ffp-contract=off -fno-math-errno: a product and a sum are fused only where fmaf() is written. */

#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX__)
#include <immintrin.h>
#define STREAMS 1
#elif !defined(STREAMS)
#define STREAMS 0 /* a core that sees whole lines written does not read them first (Arm: write streaming) */
#endif

/* Outputs may be the inputs, so restrict would be wrong; elements never depend on other elements. */
#if defined(__clang__)
#define EACH _Pragma("clang loop vectorize(assume_safety)")
#else
#define EACH _Pragma("GCC ivdep")
#endif

enum { BLOCK = 1024, LANES = 32 /* bytes of one streaming store */ };
enum { CHUNK = 65536 /* elements: a few tenths of a millisecond, much longer than taking the next chunk */ };
enum { LEAST = 8192 /* elements per thread: they take about as long as starting one */, MOST = 256 /* threads */ };
enum dtype { NONE = 0, FP32 = 1, BF16 = 2, FP16 = 3 };

/* Filled by _UpdateStruct in kernels.py: the same fields in the same order. */
struct update {
    const float *parameter, *first, *second; /* first: Adam's exp_avg or SGD's momentum; NULL if there is none */
    const void *gradient;
    float *parameter_out, *first_out, *second_out;
    void *copy;
    int64_t numel;
    int64_t plain; /* from this element on, moments are rounded as OTHER: see kernels.py */
    int32_t gradient_dtype, copy_dtype;
    float factor[2]; /* the gradient is multiplied by each; 1 changes no bit */
    float sign;      /* -1 to maximise */
    float l2;        /* weight decay that is added to the gradient */
    float decay;     /* decoupled: a factor of the parameter; CUDA_FUSED: parameter += decay * parameter */
    float rate;      /* of the update, with its sign: Adam's -lr / correction, SGD's -lr */
    /* Adam */
    float beta1, weight /* 1 - beta1 */;
    float beta2, weight2 /* 1 - beta2 */, correction2 /* square root of 1 - beta2^step */, eps;
    /* SGD */
    float momentum, undamped /* 1 - dampening */;
    int32_t begins, nesterov; /* begins: the momentum is the gradient */
    int32_t cuda;             /* Adam is rounded as on a GPU: 1 as torch's foreach kernels do, 2 as its fused one */
    int32_t separate;         /* products are rounded before they are added: torch uses no FMA */
    void (*roots)(int64_t n, const float *in, float *out, int64_t mode); /* MKL's vmsSqrt; NULL: sqrtf */
};

typedef void block_update(const struct update *, int64_t at, int n, const float *g, float *p, float *m, float *v);

/* A started update. The pool's lock protects what changes. */
struct call {
    struct pool *pool;
    struct update update;
    block_update *block;
    struct call *next; /* started after it */
    int64_t chunk;     /* elements: CHUNK, or less so that every thread gets one */
    int64_t taken;     /* elements in chunks that threads have taken: the first ones */
    int working;       /* threads that work on a chunk */
};

/* Threads that run calls in the order in which they were started: [Note: kernel threads] in kernels.py. */
struct pool {
    pthread_mutex_t lock;
    pthread_cond_t changed;    /* a call is done, or the last thread exits */
    struct call *first, *last; /* calls with chunks left; last is undefined if first is NULL */
    int threads;               /* running or being started: they check first before they exit */
};

static int is_taken(const struct call *call) { return call->taken == call->update.numel; }

static int is_done(const struct call *call) { return is_taken(call) && !call->working; }

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float from_bf16(uint16_t half) { return float_of((uint32_t)half << 16); }

static inline float from_fp16(uint16_t half) {
    const uint32_t magnitude = half & 0x7fffu, sign = (uint32_t)(half & 0x8000u) << 16;
    const uint32_t offset = magnitude >= 0x7c00u ? 224u << 23 : 112u << 23; /* infinities and NaN; all others */
    const uint32_t rebased = (magnitude << 13) + offset;
    const uint32_t subnormal = bits_of((float)(int32_t)magnitude * 0x1p-24f);
    return float_of(sign | (magnitude < 0x0400u ? subnormal : rebased));
}

/* Both round to nearest, ties to even. */
static inline uint16_t to_bf16(float value) {
    const uint32_t bits = bits_of(value), rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

static inline uint16_t to_fp16(float value) {
    const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu, sign = (bits >> 16) & 0x8000u;
    const uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f); /* the last bit of 0.5 is 2^-24 */
    uint32_t half = magnitude < 0x38800000u ? subnormal : normal;                   /* 2^-14 */
    half = magnitude >= 0x477ff000u ? 0x7c00u : half;                               /* 65520 */
    half = magnitude > 0x7f800000u ? 0x7e00u : half;
    return (uint16_t)(sign | half);
}

static void read_gradient(const struct update *u, int64_t at, int n, float *g) {
    const float first = u->factor[0], second = u->factor[1], sign = u->sign, l2 = u->l2;
    const float *full = (const float *)u->gradient + at, *p = u->parameter + at;
    const uint16_t *half = (const uint16_t *)u->gradient + at;
    if (u->gradient_dtype == FP32) {
        EACH for (int i = 0; i < n; i++) g[i] = full[i] * first * second * sign;
    } else if (u->gradient_dtype == BF16) {
        EACH for (int i = 0; i < n; i++) g[i] = from_bf16(half[i]) * first * second * sign;
    } else {
        EACH for (int i = 0; i < n; i++) g[i] = from_fp16(half[i]) * first * second * sign;
    }
    if (l2 == 0) return; /* 0 times an infinite parameter is NaN */
    if (u->cuda == 2 || u->separate) {
        EACH for (int i = 0; i < n; i++) g[i] = g[i] + p[i] * l2;
    } else {
        EACH for (int i = 0; i < n; i++) g[i] = fmaf(p[i], l2, g[i]);
    }
}

static void write_copy(int dtype, int n, const float *p, void *copy) {
    uint16_t *half = copy;
    if (dtype == FP32) {
        memcpy(copy, p, (size_t)n * sizeof *p);
    } else if (dtype == BF16) {
        EACH for (int i = 0; i < n; i++) half[i] = to_bf16(p[i]);
    } else {
        EACH for (int i = 0; i < n; i++) half[i] = to_fp16(p[i]);
    }
}

enum rounding { OTHER, PLAIN, CUDA, CUDA_FUSED, SEPARATE }; /* see kernels.py */
enum { MKL_MODE = 0x140102 /* VML_FTZDAZ_OFF | VML_ERRMODE_IGNORE | VML_HA: the mode in which torch calls vmsSqrt */ };

static inline __attribute__((always_inline)) float new_first(
    const struct update *u, float weight, float g, float m, float base, const enum rounding way) {
    if (way == CUDA_FUSED) return fmaf(u->beta1, m, fmaf(-u->beta1, g, g));
    if (way == SEPARATE) return base + weight * (g - m);
    return fmaf(weight, g - m, base);
}

static inline __attribute__((always_inline)) float new_second(
    const struct update *u, float g, float v, const enum rounding way) {
    const float scaled = u->weight2 * g, square = g * g;
    if (way == CUDA_FUSED) return fmaf(u->beta2, v, fmaf(-u->beta2, square, square));
    if (way == CUDA) return fmaf(u->weight2, square, v * u->beta2);
    if (way == PLAIN) return fmaf(scaled, g, v * u->beta2);
    if (way == SEPARATE) return v * u->beta2 + scaled * g;
    return fmaf(v, u->beta2, scaled * g);
}

static inline __attribute__((always_inline)) float new_parameter(
    const struct update *u, float p, float first, float root, int decays, const enum rounding way) {
    const float denominator = root / u->correction2 + u->eps;
    const float decayed = way != CUDA_FUSED ? p * u->decay : decays ? fmaf(u->decay, p, p) : p;
    return way == CUDA ? fmaf(u->rate, first / denominator, decayed) : decayed + u->rate * first / denominator;
}

static inline __attribute__((always_inline)) void adam_loop(
    const struct update *all, int64_t at, int n, const float *g, float *p, float *m, float *v,
    const enum rounding way) {
    const struct update u = *all; /* a copy: no store can alias it */
    const float *p0 = u.parameter + at, *m0 = u.first + at, *v0 = u.second + at;
    const int decays = u.decay != 0; /* 0 times an infinite parameter is NaN */
    /* torch's lerp starts at the nearer end */
    const int near = fabsf(u.weight) < 0.5f;
    const float weight = near ? u.weight : u.weight - 1.0f;
    const float *base = near ? m0 : g;
    if (!u.roots) {
        EACH for (int i = 0; i < n; i++) {
            const float first = new_first(&u, weight, g[i], m0[i], base[i], way);
            const float second = new_second(&u, g[i], v0[i], way);
            p[i] = new_parameter(&u, p0[i], first, sqrtf(second), decays, way);
            m[i] = first;
            v[i] = second;
        }
        return;
    }
    _Alignas(64) float roots[BLOCK];
    EACH for (int i = 0; i < n; i++) {
        m[i] = new_first(&u, weight, g[i], m0[i], base[i], way);
        v[i] = new_second(&u, g[i], v0[i], way);
    }
    u.roots(n, v, roots, MKL_MODE);
    EACH for (int i = 0; i < n; i++) p[i] = new_parameter(&u, p0[i], m[i], roots[i], decays, way);
}

static void adam_block(const struct update *u, int64_t at, int n, const float *g, float *p, float *m, float *v) {
    if (u->cuda == 2)
        adam_loop(u, at, n, g, p, m, v, CUDA_FUSED);
    else if (u->cuda)
        adam_loop(u, at, n, g, p, m, v, CUDA);
    else if (u->separate)
        adam_loop(u, at, n, g, p, m, v, SEPARATE);
    else if (at < u->plain)
        adam_loop(u, at, n, g, p, m, v, PLAIN);
    else
        adam_loop(u, at, n, g, p, m, v, OTHER);
}

static inline __attribute__((always_inline)) float sum(float product, float by, float added, const int separate) {
    return separate ? product * by + added : fmaf(product, by, added);
}

static inline __attribute__((always_inline)) void sgd_loop(
    const struct update *u, int64_t at, int n, const float *g, float *p, float *m, const int separate) {
    const float *p0 = u->parameter + at, rate = u->rate, momentum = u->momentum, undamped = u->undamped;
    if (!u->first_out) {
        EACH for (int i = 0; i < n; i++) p[i] = sum(g[i], rate, p0[i], separate);
        return;
    }
    if (u->begins) {
        memcpy(m, g, (size_t)n * sizeof *g);
    } else {
        const float *m0 = u->first + at;
        if (at < u->plain) {
            EACH for (int i = 0; i < n; i++) m[i] = sum(g[i], undamped, m0[i] * momentum, separate);
        } else {
            EACH for (int i = 0; i < n; i++) m[i] = sum(m0[i], momentum, g[i] * undamped, separate);
        }
    }
    if (u->nesterov) {
        EACH for (int i = 0; i < n; i++) p[i] = sum(sum(m[i], momentum, g[i], separate), rate, p0[i], separate);
    } else {
        EACH for (int i = 0; i < n; i++) p[i] = sum(m[i], rate, p0[i], separate);
    }
}

static void sgd_block(const struct update *u, int64_t at, int n, const float *g, float *p, float *m, float *v) {
    (void)v;
    if (u->separate)
        sgd_loop(u, at, n, g, p, m, 1);
    else
        sgd_loop(u, at, n, g, p, m, 0);
}

/* Write past the caches: the values are not read soon, and the lines are not read from memory first. */
static void stream(void *to, const void *from, size_t nbytes) {
    size_t at = 0;
#if defined(__AVX__)
    if ((uintptr_t)to % LANES == 0)
        for (; at + LANES <= nbytes; at += LANES)
            _mm256_stream_ps((float *)((char *)to + at), _mm256_load_ps((const float *)((const char *)from + at)));
#endif
    memcpy((char *)to + at, (const char *)from + at, nbytes - at);
}

static float *block_output(const float *in, float *out, int64_t at, float *buffer) {
    return STREAMS && out && out != in ? buffer : out ? out + at : NULL;
}

static void flush_block(float *out, int64_t at, int n, const float *where, const float *buffer) {
    if (where == buffer) stream(out + at, buffer, (size_t)n * sizeof *out);
}

static void run_chunk(const struct update *u, block_update *block, int64_t begin, int64_t end) {
    const size_t copied = u->copy_dtype == FP32 ? 4 : 2; /* bytes */
    _Alignas(64) float g[BLOCK], pb[BLOCK], mb[BLOCK], vb[BLOCK], cb[BLOCK];
    for (int64_t at = begin, next; at < end; at = next) {
        next = at + BLOCK < end ? at + BLOCK : end;
        if (at < u->plain && u->plain < next) next = u->plain; /* all elements of a block are rounded the same way */
        const int n = (int)(next - at);
        float *p = block_output(u->parameter, u->parameter_out, at, pb);
        float *m = block_output(u->first, u->first_out, at, mb), *v = block_output(u->second, u->second_out, at, vb);
        read_gradient(u, at, n, g);
        block(u, at, n, g, p, m, v);
        if (u->copy_dtype) {
            char *copy = (char *)u->copy + (size_t)at * copied;
            write_copy(u->copy_dtype, n, p, STREAMS ? (void *)cb : copy);
            if (STREAMS) stream(copy, cb, (size_t)n * copied);
        }
        flush_block(u->parameter_out, at, n, p, pb);
        flush_block(u->first_out, at, n, m, mb);
        flush_block(u->second_out, at, n, v, vb);
    }
#if defined(__AVX__)
    _mm_sfence(); /* make streamed writes visible to threads that take the pool's lock after this one */
#endif
}

/* Run chunks until none is left. The caller holds the pool's lock; it is held again on return. */
static void run_chunks(struct pool *pool) {
    for (struct call *call; (call = pool->first);) {
        const int64_t begin = call->taken, rest = call->update.numel - begin;
        const int64_t end = begin + (rest < call->chunk ? rest : call->chunk);
        call->taken = end;
        call->working++;
        if (is_taken(call)) pool->first = call->next;
        pthread_mutex_unlock(&pool->lock);
        run_chunk(&call->update, call->block, begin, end);
        pthread_mutex_lock(&pool->lock);
        call->working--;
        if (is_done(call)) pthread_cond_broadcast(&pool->changed); /* it may be freed once the lock is released */
    }
}

static void *thread_main(void *argument) {
    struct pool *pool = argument;
    pthread_mutex_lock(&pool->lock);
    run_chunks(pool);
    if (!--pool->threads) pthread_cond_broadcast(&pool->changed);
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

/* Start threads; return how many could not be started. */
static int start_threads(struct pool *pool, int threads) {
    pthread_attr_t detached;
    pthread_t thread;
    if (!threads || pthread_attr_init(&detached)) return threads;
    if (!pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED))
        while (threads && !pthread_create(&thread, &detached, thread_main, pool)) threads--;
    pthread_attr_destroy(&detached);
    return threads;
}

/* Queue a call, which has elements, after those that were started before. */
static void enqueue(struct pool *pool, struct call *call, int threads) {
    const int64_t numel = call->update.numel;
    if (threads > MOST) threads = MOST;
    if (threads > numel / LEAST) threads = (int)(numel / LEAST);
    const int64_t even = (numel / BLOCK / (threads + 1) + 1) * BLOCK;
    call->chunk = even < CHUNK ? even : CHUNK;
    pthread_mutex_lock(&pool->lock);
    if (pool->first)
        pool->last->next = call;
    else
        pool->first = call;
    pool->last = call;
    const int missing = threads > pool->threads ? threads - pool->threads : 0;
    pool->threads += missing;
    pthread_mutex_unlock(&pool->lock); /* running threads do not wait while others are started */
    const int failed = start_threads(pool, missing);
    pthread_mutex_lock(&pool->lock);
    pool->threads -= failed;
    if (!pool->threads) run_chunks(pool); /* there are no threads: this one does the work */
    pthread_mutex_unlock(&pool->lock);
}

static void init_pool(struct pool *pool) {
    *pool = (struct pool){.threads = 0};
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->changed, NULL);
}

/* Wait until all threads have exited. */
static void destroy_pool(struct pool *pool) {
    pthread_mutex_lock(&pool->lock);
    while (pool->threads) pthread_cond_wait(&pool->changed, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
    pthread_mutex_destroy(&pool->lock);
    pthread_cond_destroy(&pool->changed);
}

/* Update now, with this thread and others. */
static void run(const struct update *u, block_update *block, int threads) {
    struct pool pool;
    struct call call = {.pool = &pool, .update = *u, .block = block};
    if (u->numel <= 0) return;
    init_pool(&pool);
    enqueue(&pool, &call, threads - 1);
    pthread_mutex_lock(&pool.lock);
    run_chunks(&pool);
    pthread_mutex_unlock(&pool.lock);
    destroy_pool(&pool); /* a thread that works on a chunk has not exited */
}

static struct call *start(struct pool *pool, const struct update *u, block_update *block, int threads) {
    struct call *call = u->numel > 0 ? malloc(sizeof *call) : NULL;
    if (call) {
        *call = (struct call){.pool = pool, .update = *u, .block = block};
        enqueue(pool, call, threads);
    } else {
        run(u, block, threads);
    }
    return call;
}

void zeroshard_adam(const struct update *u, int threads) { run(u, adam_block, threads); }

void zeroshard_sgd(const struct update *u, int threads) { run(u, sgd_block, threads); }

/* Return NULL if there is no memory. */
struct pool *zeroshard_threads_new(void) {
    struct pool *pool = malloc(sizeof *pool);
    if (pool) init_pool(pool);
    return pool;
}

/* All calls must have been waited for. */
void zeroshard_threads_free(struct pool *pool) {
    destroy_pool(pool);
    free(pool);
}

/* Both return at once. The result must be passed to zeroshard_wait(), unless it is NULL: then the update is done. */
struct call *zeroshard_adam_start(struct pool *pool, const struct update *u, int threads) {
    return start(pool, u, adam_block, threads);
}

struct call *zeroshard_sgd_start(struct pool *pool, const struct update *u, int threads) {
    return start(pool, u, sgd_block, threads);
}

void zeroshard_wait(struct call *call) {
    struct pool *pool = call->pool;
    pthread_mutex_lock(&pool->lock);
    while (!is_done(call)) pthread_cond_wait(&pool->changed, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
    free(call);
}
