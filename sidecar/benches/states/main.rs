//! Found tokens of a model with states beside full attention, by the states kept of it. The policy, the sessions and the sidecar's core are
//! the product's; no block has bytes. The last line is JSON.
//!
//! Arguments: `NAME FILE` for a trace (`benches/policy.py` makes the file). The pool has a tenth of the bytes of all distinct blocks and of
//! a state at each of their ends. Keys:
//!
//! - `hits`: share of the prompts' tokens found, the first quarter of the requests not counted
//! - `every_hits`: the same with a state kept at every block's end; `every_unbounded_hits`: in a pool that keeps everything
//! - `by_unbounded`: `hits` by `every_unbounded_hits`
//! - `bytes_by_equal`: the pool by the smallest one that finds as much with a state at every block's end
//! - `forecast`: the largest difference between the forecast for a half, for two and for four times the pool and the real share
//! - `states_by_full`: kept states by kept blocks of full attention, at the end
//!
//! The model is [Qwen3.6-27B](https://huggingface.co/Qwen/Qwen3.6-27B/blob/main/config.json): 64 layers, every fourth with full attention
//! (4 KV heads of 256 numbers in bfloat16), the others with a state of 48 heads of 128 x 128 numbers in float32 and 3 columns of 10,240
//! numbers in bfloat16 for a convolution. vLLM makes blocks of 784 tokens of it, and four cache groups of 16 layers.

#![expect(clippy::print_stdout, reason = "a bench reports")]

mod engine;
mod pod;
mod trace;

use sidecar::forecaster::Replay;
use tiers::forecast::ROOMS;

use self::engine::{Engine, Shape, States};
use self::pod::{GroupShape, pool_of};
use self::trace::Request;

const BLOCK_TOKENS: u32 = 784;
/// Each group has one layer here, as the largest pool has 2 TiB: all bytes are divided by this.
const LAYERS_OF_GROUP: u64 = 16;
const FULL_BYTES: u64 = BLOCK_TOKENS as u64 * 2 * 4 * 256 * 2;
const STATE_BYTES: u64 = 48 * 128 * 128 * 4 + 3 * 10_240 * 2;
const STATE_GROUPS: u64 = 3;
/// The default of `vllm serve` on a GPU of 70 GiB or more.
const STEP_TOKENS: u32 = 8192;
const TOKENS_MAX: u32 = 262_144;
/// With the default of `pillion.checkpoint_tokens`.
const OURS: States = States::Pillion(16_384);
/// The pool has one of so many parts of all distinct bytes.
const POOL_PARTS: u64 = 10;
/// Looks for a pool of equal hits.
const LOOKS: usize = 7;

/// The results of one replay.
struct Played {
    hits: f64,
    /// The same of the blocks asked for, and the share foretold for each of [`ROOMS`].
    block_hits: f64,
    foretold: [f64; ROOMS.len()],
    /// Kept blocks of full attention, and states of all groups, at the end.
    full: u64,
    states: u64,
}

fn shape() -> Shape {
    let group = |number| {
        let has_states = number > 0;
        GroupShape { block_bytes: if has_states { STATE_BYTES } else { FULL_BYTES }, has_states }
    };
    let groups = (0..=STATE_GROUPS).map(group).collect();
    Shape { groups, block_tokens: BLOCK_TOKENS, step_tokens: STEP_TOKENS, tokens_max: TOKENS_MAX }
}

/// Replays a trace; the first quarter of the requests is not counted.
fn play(requests: &[Request], pool_bytes: u64, states: States) -> Played {
    let mut engine = Engine::new(&shape(), pool_bytes, states);
    let mut replay = Replay::new(pool_of(pool_bytes));
    let (mut asked, mut found, mut blocks) = (0, 0, 0);
    let mut before = (0, [0; ROOMS.len()]);
    for (at, request) in requests.iter().enumerate() {
        if at == requests.len() / 4 {
            before = replay.forecast().map_or(before, |forecast| (forecast.asked(), forecast.found()));
            (asked, found, blocks) = (0, 0, 0);
        }
        let hits = engine.serve_request(request);
        engine.pod.borrow_mut().ended.drain(..).for_each(|ended| replay.record(ended));
        (asked, found) = (asked + u64::from(request.prompt), found + u64::from(hits));
        blocks += u64::from((request.prompt - 1) / BLOCK_TOKENS);
    }
    let kept = engine.pod.borrow().kept();
    let forecast = replay.forecast().expect("requests have ended");
    let foretold =
        |room: usize| (forecast.found()[room] - before.1[room]) as f64 / (forecast.asked() - before.0) as f64;
    Played {
        hits: found as f64 / asked as f64,
        block_hits: (found / u64::from(BLOCK_TOKENS)) as f64 / blocks as f64,
        foretold: std::array::from_fn(foretold),
        full: kept[0],
        states: kept[1..].iter().sum(),
    }
}

/// The largest difference between a pool's forecast for others and their hits.
fn worst_forecast(requests: &[Request], pool_bytes: u64, ours: &Played) -> f64 {
    let others = [0.5, 2.0, 4.0].map(|times| (pool_bytes as f64 * times) as u64);
    let [half, double, four] = others.map(|pool| play(requests, pool, OURS).block_hits);
    let real = [half, ours.block_hits, double, four];
    println!("foretold {:.4?}, found {real:.4?}", ours.foretold);
    real.iter().zip(ours.foretold).map(|(real, foretold)| (real - foretold).abs()).fold(0.0, f64::max)
}

/// The smallest pool found in which a state at every boundary has such hits.
fn pool_of_equal_hits(requests: &[Request], hits: f64, (mut low, mut high): (u64, u64)) -> u64 {
    for _ in 0..LOOKS {
        let middle = (low as f64 * high as f64).sqrt() as u64;
        let played = play(requests, middle, States::Every);
        println!("every boundary, {:.1} GB: {:.4}", (middle * LAYERS_OF_GROUP) as f64 / 1e9, played.hits);
        (low, high) = if played.hits < hits { (middle, high) } else { (low, middle) };
    }
    high
}

fn main() {
    // Cargo adds this option.
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    let mut cells = Vec::new();
    while let Some(name) = arguments.next() {
        let requests = trace::read(&arguments.next().expect("a trace's file follows its name"), BLOCK_TOKENS);
        let all = trace::distinct(&requests) * (FULL_BYTES + STATE_GROUPS * STATE_BYTES);
        let pool = all / POOL_PARTS;
        let mut say = |key: &str, value: f64| {
            println!("{name}_states_{key:24} {value:.4}");
            cells.push(format!("\"{name}_states_{key}\":{value:.4}"));
        };
        say("pool_gb", (pool * LAYERS_OF_GROUP) as f64 / 1e9);
        let ours = play(&requests, pool, OURS);
        say("hits", ours.hits);
        say("states_by_full", ours.states as f64 / ours.full.max(1) as f64);
        say("every_hits", play(&requests, pool, States::Every).hits);
        // A segment's header and its rest take room, too.
        let unbounded = play(&requests, 2 * all, States::Every).hits;
        say("every_unbounded_hits", unbounded);
        say("by_unbounded", ours.hits / unbounded);
        let equal = pool_of_equal_hits(&requests, ours.hits, (pool, 2 * all));
        say("bytes_by_equal", pool as f64 / equal as f64);
        say("forecast", worst_forecast(&requests, pool, &ours));
    }
    println!("{{{}}}", cells.join(","));
}
