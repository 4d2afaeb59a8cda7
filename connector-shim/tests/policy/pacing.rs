//! Requests arrive together, load synchronously on a GPU, and begin one after the other, step by step.

use std::time::Duration;

use connector_shim::core::policy::{FoundTokens, LoadMode, RequestId};

use crate::harness::{BLOCK_TOKENS, Engine, Setup};

/// 10 ms at 40 GB/s are 190 of these.
const BLOCK_BYTES: u64 = 2 << 20;
/// New tokens of a full step.
const STEP_NEW_TOKENS: u32 = 512;
/// How long an idle step waits for another engine.
const LINGER: Duration = Duration::from_millis(2);

/// An engine's scheduler, with waiting requests. Everything they ask for is there.
struct Queue {
    engine: Engine,
    requests: Vec<RequestId>,
    /// Kept tokens of each.
    found: Vec<u32>,
    waiting: Vec<usize>,
    /// Loads in the background, and the steps to learn of their ends.
    loading: Vec<(u64, usize)>,
    /// Steps from the beginning of a load in the background until the engine learns of its end.
    load_steps: u64,
    step: u64,
}

/// The requests computed in a step, and the requests with a load begun in the background.
type Taken = (Vec<usize>, Vec<usize>);

impl Queue {
    fn new(setup: Setup, count: usize, found_blocks: u32, new_tokens: u32) -> Self {
        let mut queue = Self {
            engine: engine(setup),
            requests: Vec::new(),
            found: Vec::new(),
            waiting: Vec::new(),
            loading: Vec::new(),
            load_steps: 2,
            step: 0,
        };
        (0..count).for_each(|_| queue.arrive(found_blocks, new_tokens));
        queue
    }

    fn arrive(&mut self, found_blocks: u32, new_tokens: u32) {
        let found = found_blocks * BLOCK_TOKENS;
        self.waiting.push(self.requests.len());
        self.requests.push(self.engine.arrive(found + new_tokens));
        self.found.push(found);
    }

    /// A step. Requests put off by it go on waiting.
    fn schedule(&mut self) -> Taken {
        let (mut computed, mut background) = (Vec::new(), Vec::new());
        for (_, request) in self.loading.extract_if(.., |(ready, _)| *ready <= self.step) {
            let id = self.requests[request];
            self.engine[id].computed = self.found[request];
            self.engine.allocate(id, 0);
            computed.push(request);
        }
        for request in std::mem::take(&mut self.waiting) {
            let id = self.requests[request];
            let FoundTokens::Tokens(tokens, beside) = self.engine.matched(id, 0) else {
                self.waiting.push(request);
                continue;
            };
            // A hit counts up to the request's kept tokens: something is left to compute.
            self.engine.allocate(id, tokens.min(self.found[request]));
            if beside {
                self.loading.push((self.step + self.load_steps, request));
            }
            if beside { &mut background } else { &mut computed }.push(request);
        }
        let scheduled: Vec<_> = computed.iter().map(|request| (self.requests[*request], 1)).collect();
        self.engine.step(Vec::new(), &scheduled);
        self.step += 1;
        (computed, background)
    }

    /// Steps until no request waits.
    fn all_steps(&mut self) -> Vec<Taken> {
        let mut steps = Vec::new();
        while !(self.waiting.is_empty() && self.loading.is_empty()) {
            steps.push(self.schedule());
        }
        steps
    }
}

fn engine(mut setup: Setup) -> Engine {
    setup.machine.block_bytes = BLOCK_BYTES;
    setup.machine.recomputes = setup.options.strict_tokens.is_none();
    let mut engine = setup.engine();
    // Not bound: nothing is checked.
    engine.bind(0);
    engine.sidecar().hits = Some(u32::MAX);
    engine
}

fn on_gpu(load: LoadMode) -> Setup {
    let mut setup = Setup::on_gpu();
    setup.machine.load = load;
    setup
}

#[test]
fn a_step_takes_in_only_so_much() {
    let cases = [
        // A turn of a conversation: its new tokens fill the step.
        (300, 1024, 1),
        // 400 MB each: the copy does.
        (200, 16, 1),
        // Little of both: several.
        (40, 16, 5),
        (4, 100, 6),
    ];
    for (found_blocks, new_tokens, together) in cases {
        let steps = Queue::new(on_gpu(LoadMode::Auto), 8, found_blocks, new_tokens).all_steps();
        let fits =
            |computed: &Vec<usize>| (computed.len().saturating_sub(1)) as u32 * new_tokens <= STEP_NEW_TOKENS;
        assert!(steps.iter().all(|(computed, _)| fits(computed)));
        assert_eq!(steps[0].0.len(), together);
        assert!(steps.iter().all(|(_, background)| background.len() <= 1));
        let mut all: Vec<_> = steps.into_iter().flat_map(|(computed, _)| computed).collect();
        all.sort_unstable();
        assert_eq!(all, (0..8).collect::<Vec<_>>());
    }
}

#[test]
fn a_full_step_begins_the_next_load_beside_it() {
    let steps = Queue::new(on_gpu(LoadMode::Auto), 6, 300, 1024).all_steps();
    let expected: [(&[usize], &[usize]); 7] = [
        (&[0], &[1]),
        (&[2], &[]),
        // The request with an ended load fills its step: nothing is loaded synchronously beside it.
        (&[1], &[3]),
        (&[4], &[]),
        (&[3], &[5]),
        (&[], &[]),
        (&[5], &[]),
    ];
    assert_eq!(steps, expected.map(|(computed, background)| (computed.to_vec(), background.to_vec())));
}

#[test]
fn only_so_many_loads_hold_blocks_in_the_background() {
    let mut queue = Queue::new(on_gpu(LoadMode::Auto), 12, 300, 1024);
    queue.load_steps = 100;
    let began: usize = (0..12).map(|_| queue.schedule().1.len()).sum();
    assert_eq!(began, 1);
    // An aborted request counts no more.
    let (_, given_up) = queue.loading.pop().unwrap();
    queue.engine.finish(queue.requests[given_up]);
    queue.arrive(300, 1024);
    queue.arrive(300, 1024);
    assert_eq!(queue.schedule(), (vec![12], vec![13]));
}

#[test]
fn a_user_who_wants_synchronous_loads_gets_no_other() {
    let steps = Queue::new(on_gpu(LoadMode::Sync), 3, 300, 1024).all_steps();
    assert_eq!(steps, [0, 1, 2].map(|request| (vec![request], vec![])));
}

#[test]
fn nobody_is_put_off_elsewhere() {
    let mut on_host = Setup::default();
    on_host.machine.load = LoadMode::Sync;
    for setup in [on_host, on_gpu(LoadMode::Async)] {
        let (computed, background) = Queue::new(setup, 8, 300, 1024).schedule();
        assert_eq!(computed.len() + background.len(), 8);
    }
}

#[test]
fn what_is_on_its_way_is_loaded_beside_the_steps() {
    let mut queue = Queue::new(on_gpu(LoadMode::Auto), 1, 4, 16);
    queue.engine.sidecar().arriving = true;
    assert_eq!(queue.schedule(), (vec![], vec![0]));
    assert_eq!(queue.engine.sidecar().loads.iter().map(|load| load.sync).collect::<Vec<_>>(), [false]);
}

/// A request for a prompt computed by another engine.
fn awaited(engine: &mut Engine, blocks: u32, new_tokens: u32) -> RequestId {
    let tokens = blocks * BLOCK_TOKENS + new_tokens;
    engine.arrive_awaiting(tokens, tokens)
}

#[test]
fn an_idle_step_waits_once_for_another_engine() {
    let mut engine = engine(on_gpu(LoadMode::Auto));
    engine.sidecar().hits = None;
    let requests = [awaited(&mut engine, 4, 16), awaited(&mut engine, 4, 16)];
    for _ in 0..2 {
        assert_eq!(requests.map(|request| engine.matched(request, 0)), [FoundTokens::Later; 2]);
        engine.idle();
    }
    assert_eq!(engine.sidecar().lingered, [(0, LINGER), (0, LINGER)]);
    // Another request is given memory, and computed.
    let other = engine.arrive(BLOCK_TOKENS);
    engine.allocate(other, 0);
    engine.matched(requests[0], 0);
    engine.decode(&[other]);
    engine.matched(requests[0], 0);
    let own = engine.arrive(4 * BLOCK_TOKENS + 16);
    engine.matched(own, 0);
    assert_eq!(engine.sidecar().lingered.len(), 2, "others wait for the step, or nobody computes for it");
}

#[test]
fn a_strict_engine_gives_up_what_was_not_handed_over() {
    let mut setup = on_gpu(LoadMode::Auto);
    setup.options.strict_tokens = Some(32);
    let mut engine = engine(setup);
    let [short, long, late] = [(); 3].map(|()| awaited(&mut engine, 4, 16));
    let own = engine.arrive(4 * BLOCK_TOKENS + 16);
    engine.sidecar().hits = Some(3);
    assert_eq!(
        engine.matched(short, 0),
        FoundTokens::Tokens(48, false),
        "a block and what is always computed"
    );
    engine.sidecar().hits = Some(2);
    assert_eq!(engine.matched(own, 0), FoundTokens::Tokens(32, false));
    assert_eq!(engine.matched(long, 0), FoundTokens::Tokens(79, true));
    engine.allocate(long, 79);
    assert_eq!(engine.matched(late, 0), FoundTokens::Tokens(79, true));
    engine.sidecar().hits = Some(5);
    let found = engine.matched(late, 0);
    assert_eq!(found, FoundTokens::Tokens(79, false), "what came meanwhile");
    engine.allocate(late, 79);
    let blocks = engine[long].blocks[0].clone();
    let step = engine.idle();
    let lost: Vec<_> =
        step.parts[0].lost.iter().map(|lost| (lost.request, lost.blocks.clone(), lost.sync)).collect();
    assert_eq!(lost, [(long, blocks, false)]);
    let loads: Vec<_> = step.parts[0].loads.iter().map(|load| load.request).collect();
    assert_eq!(loads, [late]);
}

#[test]
fn the_rate_of_prompts_is_told_by_a_word_of_the_session() {
    let mut engine = Engine::new();
    assert_eq!(engine.sidecar().prefill(), None);
    for round in 1..=6_u32 {
        let id = engine.arrive(1024);
        let step = engine.compute(id);
        engine.time += Duration::from_millis(100);
        engine.take(&step);
        assert_eq!(engine.sidecar().prefill().is_some(), round >= 4, "round {round}");
        engine.finish(id);
    }
    let rate = engine.sidecar().prefill().unwrap();
    assert!((rate.seconds(0, 1024) - 0.1).abs() < 0.01, "{rate:?}");
}
