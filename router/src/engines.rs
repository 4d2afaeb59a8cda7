//! The engines of one role, and the choice of the next one.

use std::sync::{Arc, Mutex, PoisonError};

use prometheus::proto::MetricFamily;
use tokio::time::Instant;

use super::address::EngineAddress;
use super::affinity::{Affinity, KnownPrompt, Trail};
use super::answer_terms::AnswerTerms;
use super::engine::{LoadShare, RouteEngine};
use super::engine_prompts::AlonePrompt;
use super::forward::RouteRequest;
use super::tls::TowardsEngines;

/// An engine with a prompt's beginning is passed over once it has this much more to do than the average.
const LOAD_OVER_AVERAGE: f64 = 1.25;
/// vLLM computes so many tokens in one step by its default.
const STEP_TOKENS: f64 = 8192.0;
/// The tokens worth one conversation of the last minute: a quarter of a step, some 50 ms.
const CONVERSATION_TOKENS: f64 = STEP_TOKENS / 4.0;
/// This many conversations of the last minutes may go to one engine for a beginning shared by all, even above
/// the average.
const SHARED_MIN: f64 = 4.0;
/// A further turn counts this much of a conversation's first turn: conversations stay at their engine, so
/// those with few turns so far count almost as much as those with many.
const TURN_SHARE: f64 = 0.25;
/// Count of engines kept with their state after they left the list: an unready pod may soon be ready again.
const GONE_MAX: usize = 64;

sidecar::named! {
    /// The work of engines on prompts.
    pub(super) enum EngineRole {
        /// They compute prompts. Their load is the tokens still to compute.
        Prefill = "prefill",
        /// They answer prompts. Their load is requests.
        Decode = "decode",
    }
}

/// All engines of one role.
#[derive(Debug)]
pub(super) struct RouteEngines {
    list: Mutex<RoleEngines>,
    /// TLS towards engines with https.
    tls: Option<Arc<TowardsEngines>>,
    role: EngineRole,
    affinity: Affinity,
    /// Engines that began to answer a prompt: they have its KV.
    answered: Affinity,
}

/// The engines of a role at one time.
#[derive(Debug, Default)]
struct RoleEngines {
    all: Arc<[Arc<RouteEngine>]>,
    /// Former engines, the last first.
    gone: Vec<Arc<RouteEngine>>,
    /// The number of the last one.
    made: u32,
}

// === impl EngineRole ===

impl EngineRole {
    /// An engine with this much under way is not passed over: requests computed together in a step, or two
    /// steps of a prompt.
    fn load_floor(self) -> f64 {
        match self {
            Self::Prefill => 2.0 * STEP_TOKENS,
            Self::Decode => 4.0,
        }
    }

    /// The load worth one conversation of the last minute: a request under way, or [`CONVERSATION_TOKENS`].
    fn request_weight(self) -> f64 {
        match self {
            Self::Prefill => CONVERSATION_TOKENS,
            Self::Decode => 1.0,
        }
    }
}

// === impl RouteEngines ===

impl RouteEngines {
    /// No engines so far. Later ones with https need `tls`.
    pub(super) fn new(role: EngineRole, tls: Option<Arc<TowardsEngines>>) -> Self {
        Self {
            list: Mutex::default(),
            tls,
            role,
            affinity: Affinity::default(),
            answered: Affinity::default(),
        }
    }

    /// Replaces the addresses of all engines. An engine with one of them keeps its state. An engine without
    /// gets no more requests, and goes on with those under way.
    pub(super) fn update(&self, addresses: Vec<EngineAddress>) {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        let (before, mut made) = (Arc::clone(&list.all), list.made);
        let mut known: Vec<_> = before.iter().chain(&list.gone).cloned().collect();
        let engine = |address| match known.iter().position(|engine| engine.address == address) {
            Some(at) => known.remove(at),
            None => {
                made += 1;
                RouteEngine::new(address, self.role.name(), self.tls.clone(), made)
            }
        };
        let all: Arc<[_]> = addresses.into_iter().map(engine).collect();
        known.truncate(GONE_MAX);
        *list = RoleEngines { all: Arc::clone(&all), gone: known, made };
        drop(list);
        let (joined, left) = (missing(&all, &before), missing(&before, &all));
        if !(joined.is_empty() && left.is_empty()) {
            tracing::info!(role = ?self.role, joined, left, engines = all.len(), "the engines have changed");
        }
    }

    /// All engines of the role.
    pub(super) fn all(&self) -> Arc<[Arc<RouteEngine>]> {
        Arc::clone(&self.list.lock().unwrap_or_else(PoisonError::into_inner).all)
    }

    /// Returns the engines with blocks of a prompt in the mesh, or else with its longest known beginning.
    fn known(&self, trail: &Trail) -> KnownPrompt {
        self.held(trail).unwrap_or_else(|| self.affinity.known(trail))
    }

    /// Returns the engines with blocks of a prompt in the mesh, or else with an answer to its longest known beginning.
    fn answered(&self, trail: &Trail) -> KnownPrompt {
        self.held(trail).unwrap_or_else(|| self.answered.answered(trail))
    }

    fn held(&self, trail: &Trail) -> Option<KnownPrompt> {
        let at = |engine: &Arc<RouteEngine>| (engine.number, trail.held.at(&engine.address.url));
        (!trail.held.is_empty()).then(|| KnownPrompt::of_held(self.all().iter().map(at).collect(), trail))
    }

    /// Returns true if an engine up has the conversation of a prompt, or most of the prompt.
    pub(super) fn knows(&self, trail: &Trail, now: Instant) -> bool {
        let known = self.affinity.known(trail);
        let has = |engine: &Arc<RouteEngine>| engine.is_up(now) && known.rank(engine.number).is_some();
        trail.is_bound || known.is_mostly(trail) && self.all().iter().any(has)
    }

    /// Returns the engines for a prompt without a prefill engine, each with its missing tokens of `tokens`: engines up and at most a quarter
    /// above the average of requests, or else all engines up. A new conversation brings more prompts: it counts
    /// [`CONVERSATION_TOKENS`] more at an engine for each conversation of the last minutes there.
    pub(super) fn unknown_at_free(
        &self,
        trail: &Trail,
        tokens: u64,
        now: Instant,
    ) -> Vec<(Arc<RouteEngine>, u64)> {
        let mut all = self.unknown_at_each(trail, tokens, now);
        let loads: Vec<_> = all.iter().map(|(engine, _)| LoadFigures::of_engine(engine, now)).collect();
        if !self.known(trail).is_mostly(trail) {
            let more = |load: &LoadFigures| (load.lately * CONVERSATION_TOKENS) as u64;
            all.iter_mut().zip(&loads).for_each(|((_, unknown), load)| *unknown += more(load));
        }
        let most = LoadFigures::most(&loads, loads.len(), 1, self.role);
        let free = all.iter().zip(&loads).filter(|(_, load)| load.under_way + 1.0 <= most.under_way);
        let free: Vec<_> = free.map(|(offer, _)| offer.clone()).collect();
        if free.is_empty() { all } else { free }
    }

    pub(super) fn up(&self, now: Instant) -> usize {
        self.all().iter().filter(|engine| engine.is_up(now)).count()
    }

    /// Returns the terms of each engine that is up; `None` if those of one are unknown.
    pub(super) fn terms(&self, now: Instant) -> Option<Vec<Arc<AnswerTerms>>> {
        self.all().iter().filter(|engine| engine.is_up(now)).map(|engine| engine.terms()).collect()
    }

    /// Returns the engines that are up and stated no terms lately, with their role. A prompt tries a prefill engine first.
    pub(super) fn terms_due(&self, now: Instant) -> Vec<(Arc<RouteEngine>, EngineRole)> {
        let is_asked = |engine: &RouteEngine| self.role == EngineRole::Decode || !engine.is_trial_due(now);
        let due =
            |engine: &&Arc<RouteEngine>| engine.is_up(now) && engine.are_terms_due(now) && is_asked(engine);
        self.all().iter().filter(due).map(|engine| (Arc::clone(engine), self.role)).collect()
    }

    /// Takes the best engine for a prompt of `weight` tokens, with the tokens that it must compute as its
    /// load; `None` if no engine is up. The engine `spared` is taken only if no other is up.
    pub(super) fn take_share(
        &self,
        trail: &Trail,
        weight: u64,
        spared: Option<&RouteEngine>,
        now: Instant,
    ) -> Option<LoadShare> {
        let (best, tokens) = self.choose_engine(trail, weight, spared, now)?;
        Some(best.add_prompt(tokens, now))
    }

    /// Returns the best engine for a prompt of `weight` tokens, and the tokens that it must compute; `None` if no engine is up.
    pub(super) fn choose_engine(
        &self,
        trail: &Trail,
        weight: u64,
        spared: Option<&RouteEngine>,
        now: Instant,
    ) -> Option<(Arc<RouteEngine>, u64)> {
        let known = self.known(trail);
        let best =
            self.ranked(trail, weight, spared, now).into_iter().next().filter(|best| best.is_up(now))?;
        let tokens = known.remaining_tokens(best.number, weight, trail).max(1);
        Some((best, tokens))
    }

    /// Returns the engines that are up, the best to answer a prompt first, with the tokens of `tokens` that each must compute.
    pub(super) fn unknown_at_each(
        &self,
        trail: &Trail,
        tokens: u64,
        now: Instant,
    ) -> Vec<(Arc<RouteEngine>, u64)> {
        let known = self.answered(trail);
        let up = self.ranked(trail, 1, None, now).into_iter().filter(|engine| engine.is_up(now));
        let unknown = |engine: &RouteEngine| known.remaining_tokens(engine.number, tokens, trail);
        up.map(|engine| (Arc::clone(&engine), unknown(&engine))).collect()
    }

    /// Notes an engine as one that has the KV of a prompt.
    pub(super) fn note_answered(&self, trail: &Trail, engine: &RouteEngine) {
        self.answered.note_answered(trail, engine.number);
    }

    /// Returns all engines for a request: the one chosen for its prompt if that is up, then as [`Self::ranked`].
    pub(super) fn ranked_for(
        &self,
        asked: &RouteRequest,
        spared: Option<&RouteEngine>,
        now: Instant,
    ) -> Vec<Arc<RouteEngine>> {
        let mut ranked = self.ranked(&asked.trail, 1, spared, now);
        let chosen = asked.alone.and_then(|alone| alone.engine);
        let is_chosen = |engine: &Arc<RouteEngine>| Some(engine.number) == chosen && engine.is_up(now);
        if let Some(at) = ranked.iter().position(is_chosen) {
            ranked[..=at].rotate_right(1);
        }
        ranked
    }

    /// Adds a request to an engine's work.
    pub(super) fn add_request(
        &self,
        engine: &Arc<RouteEngine>,
        asked: &RouteRequest,
        now: Instant,
    ) -> LoadShare {
        let unknown = |alone: AlonePrompt| {
            let known = self.answered(&asked.trail);
            known.remaining_tokens(engine.number, alone.tokens, &asked.trail)
        };
        engine.add_request(asked.alone, asked.alone.map_or(0, unknown), now)
    }

    /// Notes an engine as one with this prompt, now or soon.
    pub(super) fn note_prompt(&self, trail: &Trail, engine: &RouteEngine, now: Instant) {
        let known = self.known(trail);
        let is_turn = known.is_own && known.rank(engine.number).is_some();
        engine.note_given(if is_turn { TURN_SHARE } else { 1.0 }, now);
        self.affinity.note_holder(trail, engine.number);
    }

    /// Notes an engine as the one with the stored response of this hash.
    pub(super) fn bind(&self, hash: u64, engine: &RouteEngine) {
        self.affinity.note_holder(&Trail::bound(hash), engine.number);
    }

    /// The metrics of all engines. Two engines of one address show those of the first.
    pub(super) fn gather(&self, now: Instant) -> Vec<MetricFamily> {
        let all = self.all();
        let firsts = all.iter().enumerate();
        let firsts = firsts.filter(|(at, engine)| all[..*at].iter().all(|one| one.address != engine.address));
        let gather = |engine: &RouteEngine| engine.gather(now);
        firsts.flat_map(|(_, engine)| gather(engine)).collect()
    }

    /// Returns all engines, the best for a prompt of `weight` tokens first. Engines that are up come first.
    /// Among these an engine with the prompt's beginning comes first, unless it has too much to do, then the
    /// engines with the least load and the fewest conversations lately. While the engine of a stored
    /// response is listed, only that one is returned. The engine `spared` comes last among those up, or among
    /// those down.
    pub(super) fn ranked(
        &self,
        trail: &Trail,
        weight: u64,
        spared: Option<&RouteEngine>,
        now: Instant,
    ) -> Vec<Arc<RouteEngine>> {
        let (all, known) = (self.all(), self.known(trail));
        let owner = all.iter().filter(|engine| trail.is_bound && known.rank(engine.number) == Some(0));
        if let [owner] = owner.collect::<Vec<_>>()[..] {
            return vec![Arc::clone(owner)];
        }
        let loads: Vec<_> = all.iter().map(|engine| LoadFigures::of_engine(engine, now)).collect();
        let most = LoadFigures::most(
            &loads,
            all.iter().filter(|engine| engine.is_up(now)).count(),
            weight,
            self.role,
        );
        let up = all.iter().zip(&loads).filter(|(engine, _)| engine.is_up(now));
        let soonest = up.map(|(_, load)| load.under_way + weight as f64).fold(f64::INFINITY, f64::min);
        let mut ranked: Vec<_> = all.iter().zip(&loads).collect();
        ranked.sort_by_cached_key(|(engine, load)| {
            let is_spared = spared.is_some_and(|spared| spared.address == engine.address);
            let rest = known.remaining_tokens(engine.number, weight, trail) as f64;
            let has_too_much = load.under_way + rest > most.under_way;
            // A beginning shared by many is worth no more than its own computation, and draws no more than an
            // equal share.
            let is_worse = load.under_way + rest > soonest || load.lately + 1.0 > most.lately;
            let is_passed_over = has_too_much || is_worse && !known.is_own;
            let place = known.rank(engine.number).filter(|_| !is_passed_over);
            // The last engine of a conversation has most of it. All engines with a shared beginning have the
            // same of it.
            let place = place.map_or(usize::MAX, |place| if known.is_own { place } else { 0 });
            (!engine.is_up(now), is_spared, place, has_too_much, load.score(self.role))
        });
        ranked.into_iter().map(|(engine, _)| Arc::clone(engine)).collect()
    }
}

/// The addresses of the engines in `engines` and not in `others`.
fn missing(engines: &[Arc<RouteEngine>], others: &[Arc<RouteEngine>]) -> String {
    let is_other = |engine: &&Arc<RouteEngine>| others.iter().any(|other| Arc::ptr_eq(other, engine));
    let missing = engines.iter().filter(|engine| !is_other(engine)).map(|engine| engine.address.to_string());
    missing.collect::<Vec<_>>().join(", ")
}

/// An engine's work under way, and its conversations of the last minutes.
#[derive(Copy, Clone, Debug)]
struct LoadFigures {
    under_way: f64,
    lately: f64,
}

// === impl LoadFigures ===

impl LoadFigures {
    fn of_engine(engine: &RouteEngine, now: Instant) -> Self {
        Self { under_way: engine.under_way() as f64, lately: engine.lately(now) }
    }

    /// The highest load allowed to an engine, with one more prompt of this weight.
    fn most(all: &[Self], up: usize, weight: u64, role: EngineRole) -> Self {
        let most = |sum: f64| (sum / up.max(1) as f64 * LOAD_OVER_AVERAGE).ceil();
        let under_way = most(all.iter().map(|load| load.under_way).sum::<f64>() + weight as f64);
        let lately = most(all.iter().map(|load| load.lately).sum::<f64>() + 1.0);
        Self { under_way: under_way.max(role.load_floor()), lately: lately.max(SHARED_MIN) }
    }

    /// Orders engines, the least loaded first, in thousandths of a request.
    fn score(self, role: EngineRole) -> u64 {
        ((self.lately + self.under_way / role.request_weight()) * 1000.0) as u64
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::affinity::PromptMark;
    use crate::engine::{DOWN, DOWN_MAX, TERMS_AGE_MAX};

    fn address(port: u16) -> EngineAddress {
        let url = format!("http://engine:{}", 8000 + port).parse().expect("a URL");
        EngineAddress::new(url, ([127, 0, 0, 1], 8000 + port).into())
    }

    fn of_role(count: u16, role: EngineRole) -> RouteEngines {
        let engines = RouteEngines::new(role, None);
        engines.update((0..count).map(address).collect());
        engines
    }

    fn engines(count: u16) -> RouteEngines {
        of_role(count, EngineRole::Decode)
    }

    /// A prompt of one mark.
    fn trail(hash: u64, is_own: bool) -> Trail {
        Trail {
            marks: vec![PromptMark { hash, bytes: 100, is_own, is_answer: false }],
            bytes: 100,
            ..Trail::default()
        }
    }

    #[test]
    fn prompts_go_to_who_has_and_was_given_least() {
        let (engines, now, other) = (of_role(2, EngineRole::Prefill), Instant::now(), Trail::default());
        let take = |at| engines.take_share(&other, 10, None, at);
        let first = take(now).expect("one");
        let second = take(now).expect("one");
        assert_ne!(first.engine.address, second.engine.address);
        engines.note_prompt(&other, &engines.all()[0], now);
        assert_eq!(
            take(now).expect("one").engine.address,
            engines.all()[1].address,
            "also where that has ended"
        );
        engines.all()[1].set_down(now);
        assert_eq!(take(now).expect("one").engine.address, engines.all()[0].address);
        engines.all()[0].set_down(now);
        assert!(take(now).is_none());
        assert!(take(now + DOWN).is_some(), "both are asked again");
    }

    #[test]
    fn of_a_known_prompt_only_the_rest_is_load() {
        let (engines, now) = (of_role(2, EngineRole::Prefill), Instant::now());
        engines.note_prompt(&trail(1, true), &engines.all()[1], now);
        let mut longer = trail(1, true);
        longer.bytes = 400;
        let share = engines.take_share(&longer, 1000, None, now).expect("one");
        assert_eq!((&share.engine.address, share.weight), (&engines.all()[1].address, 750));
    }

    #[test]
    fn blocks_in_the_mesh_make_an_engine_that_of_the_conversation() {
        let (engines, now) = (engines(3), Instant::now());
        let url = engines.all()[1].address.url.clone();
        let held = crate::affinity::HeldPrompt { tokens: 1000, held: vec![(url, 900)] };
        let located = Trail { held, ..trail(7, true) };
        assert!(!engines.knows(&trail(7, true), now));
        let unknown = |trail: &Trail| -> Vec<(u32, u64)> {
            let all = engines.unknown_at_free(trail, 1000, now);
            all.iter().map(|(engine, unknown)| (engine.number, *unknown)).collect()
        };
        assert_eq!(unknown(&located), [(2, 100), (1, 1000), (3, 1000)]);
        engines.note_prompt(&located, &engines.all()[1], now);
        assert!(engines.knows(&trail(7, true), now), "from now on the router knows it");
        // A new conversation costs more where others are; an engine with too many requests gets none.
        assert_eq!(unknown(&trail(8, true)), [(1, 1000), (3, 1000), (2, 1000 + 512)]);
        let shares: Vec<_> = (0..9).map(|_| engines.all()[1].add_share(1, now)).collect();
        assert_eq!(unknown(&located), [(1, 1000), (3, 1000)]);
        drop(shares);
        engines.all()[1].set_down(now);
        assert!(!engines.knows(&trail(7, true), now), "an engine that is down has nothing to give");
    }

    #[test]
    fn a_share_is_alone_at_an_engine_that_is_up_and_has_nothing_else_to_do() {
        let (engines, now) = (engines(1), Instant::now());
        let first = engines.all()[0].add_share(10, now);
        assert!(first.is_alone(now));
        let second = engines.all()[0].add_share(5, now);
        assert!(!first.is_alone(now) && !second.is_alone(now));
        drop(first);
        assert!(second.is_alone(now));
        engines.all()[0].set_down(now);
        drop(second);
        assert!(!engines.all()[0].add_share(5, now + DOWN).is_alone(now + DOWN), "a trial");
    }

    #[test]
    fn one_request_tries_an_engine_that_was_down_and_less_often_each_time() {
        let (engines, mut now) = (engines(2), Instant::now());
        let engine = engines.all()[0].clone();
        // All requests under way at the engine fail together.
        (0..9).for_each(|_| engine.set_down(now));
        for pause in [5, 10, 20, 30, 30] {
            let pause = Duration::from_secs(pause);
            assert!(!engine.is_up(now + pause - Duration::from_millis(1)));
            now += pause;
            assert!(engine.is_up(now));
            let trial = engine.add_share(1, now);
            assert!(!engine.is_up(now), "a second request passes it by");
            assert_eq!(engines.ranked(&Trail::default(), 1, None, now)[1].address, engine.address);
            engine.set_down(now);
            drop(trial);
        }
        now += DOWN_MAX;
        let trial = engine.add_share(1, now);
        assert!(engine.is_up(now + DOWN_MAX), "another one tries it where the first has heard nothing yet");
        drop(trial);
        engine.set_up();
        assert!(engine.is_up(now), "its answer ends that");
        engine.set_down(now);
        assert!(engine.is_up(now + DOWN), "and what was before");
    }

    #[test]
    fn terms_are_those_of_each_engine_that_is_up_and_said_again_after_it_was_down() {
        let (engines, now) = (engines(2), Instant::now());
        let terms = |length| {
            let mut terms = AnswerTerms::default();
            terms.length = length;
            terms
        };
        let lengths = |now| Some(engines.terms(now)?.iter().map(|terms| terms.length).collect::<Vec<_>>());
        engines.all()[0].set_terms(terms(10), now);
        assert_eq!(lengths(now), None, "the other one has not said its own");
        engines.all()[1].set_terms(terms(20), now);
        assert_eq!(lengths(now), Some(vec![10, 20]));
        engines.all()[0].set_down(now);
        assert_eq!(lengths(now), Some(vec![20]), "an engine that is down is not waited for");
        engines.all()[0].set_up();
        assert_eq!(lengths(now), None, "it may have come back with others");
        assert!(engines.all()[0].are_terms_missed_first() && !engines.all()[0].are_terms_missed_first());
        engines.all()[0].set_terms(terms(5), now);
        let later = now + TERMS_AGE_MAX;
        assert!(engines.terms_due(later - Duration::from_millis(1)).is_empty());
        assert_eq!(engines.terms_due(later).len(), 2);
        assert_eq!(lengths(later), Some(vec![5, 20]), "they hold while the engine is asked again");
        assert!(!engines.all()[0].are_terms_missed_first(), "a client's token may be wrong");
        assert_eq!(lengths(now), Some(vec![5, 20]));
        assert!(engines.all()[0].refuse_terms(later) && !engines.all()[0].refuse_terms(later), "named once");
        assert_eq!(lengths(now), None);
        assert_eq!(engines.terms_due(later).len(), 1, "it is asked again as late as the other one");
        engines.all()[0].set_down(now);
        engines.all()[0].set_up();
        assert!(engines.all()[0].are_terms_missed_first(), "it is named once more after it was down");
    }

    #[test]
    fn a_conversation_stays_until_its_engine_has_too_much() {
        let (engines, now) = (engines(4), Instant::now());
        let first = |trail: &Trail| engines.ranked(trail, 1, None, now)[0].clone();
        let own = trail(7, true);
        let favourite = engines.all()[2].clone();
        (0..50).for_each(|_| engines.note_prompt(&own, &favourite, now));
        assert_eq!(first(&own).address, favourite.address, "however much it was given lately");
        let shares: Vec<_> = (0..8).map(|_| favourite.add_share(1, now)).collect();
        assert_ne!(first(&own).address, favourite.address, "it has all that there is to do");
        let others: Vec<_> =
            engines.all().iter().flat_map(|engine| (0..8).map(|_| engine.add_share(1, now))).collect();
        assert_ne!(first(&own).address, favourite.address);
        drop(shares);
        assert_eq!(first(&own).address, favourite.address);
        drop(others);
        favourite.set_down(now);
        assert_eq!(
            engines.ranked(&own, 1, None, now)[3].address,
            favourite.address,
            "an engine that is down is asked last"
        );
    }

    #[test]
    fn a_beginning_that_all_share_does_not_draw_all_to_one_engine() {
        let (engines, now) = (engines(4), Instant::now());
        for _ in 0..100 {
            let best = engines.ranked(&trail(7, false), 1, None, now)[0].clone();
            engines.note_prompt(&trail(7, false), &best, now);
        }
        let lately =
            engines.all().iter().map(|engine| LoadFigures::of_engine(engine, now).lately).collect::<Vec<_>>();
        assert!(lately.iter().all(|given| (20.0..=32.0).contains(given)), "{lately:?}");
    }

    #[test]
    fn an_engine_that_stays_or_comes_back_keeps_its_state() {
        let (engines, now) = (engines(3), Instant::now());
        let [first, second, third] = [0, 1, 2].map(|at| engines.all()[at].clone());
        engines.note_prompt(&trail(7, true), &second, now);
        second.set_down(now);
        let _share = second.add_share(3, now);
        engines.update(vec![address(1), address(3), address(2)]);
        let all = engines.all();
        assert!(Arc::ptr_eq(&all[0], &second) && Arc::ptr_eq(&all[2], &third));
        assert!((all[1].number, &all[1].address) == (4, &address(3)));
        assert!(!all[0].is_up(now) && LoadFigures::of_engine(&all[0], now).under_way == 3.0);
        // The second engine left.
        engines.update(vec![address(0), address(2)]);
        assert!(Arc::ptr_eq(&engines.all()[0], &first));
        let ranked = engines.ranked(&trail(7, true), 1, None, now);
        assert!(ranked.len() == 2 && ranked.iter().all(|engine| engine.number != second.number));
        second.set_up();
        engines.update(vec![address(0), address(1), address(2)]);
        assert!(Arc::ptr_eq(&engines.ranked(&trail(7, true), 1, None, now)[0], &second), "its conversations");
    }

    #[test]
    fn a_url_that_is_given_twice_is_two_engines() {
        let engines = engines(0);
        assert!(engines.ranked(&Trail::default(), 1, None, Instant::now()).is_empty());
        engines.update(vec![address(0), address(0)]);
        let before = engines.all();
        assert!(!Arc::ptr_eq(&before[0], &before[1]));
        engines.update(vec![address(0), address(0)]);
        assert!(Arc::ptr_eq(&before[0], &engines.all()[0]) && Arc::ptr_eq(&before[1], &engines.all()[1]));
    }

    #[test]
    fn a_response_of_an_engine_that_left_is_looked_for_at_all_others() {
        let (engines, now) = (engines(3), Instant::now());
        engines.bind(9, &engines.all()[1]);
        assert_eq!(engines.ranked(&Trail::bound(9), 1, None, now).len(), 1);
        engines.update(vec![address(0), address(2)]);
        assert_eq!(engines.ranked(&Trail::bound(9), 1, None, now).len(), 2);
    }

    #[test]
    fn engines_that_are_gone_are_remembered_in_bounds() {
        let engines = engines(0);
        (0..GONE_MAX as u16 + 9).for_each(|port| engines.update(vec![address(port)]));
        assert_eq!(engines.list.lock().unwrap().gone.len(), GONE_MAX);
        let last = engines.list.lock().unwrap().gone[0].address.clone();
        assert_eq!(last, address(GONE_MAX as u16 + 7), "the last ones");
    }
}
