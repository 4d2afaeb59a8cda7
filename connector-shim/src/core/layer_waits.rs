//! Waits of a forward on a GPU for its loads, cut by cut, each just before its layers.
//!
//! A load delivers the layers of a cut together. An engine such as vLLM calls a hook before each layer, but not in every kind of forward:
//! a replayed full graph calls none. So a forward may wait cut by cut only after a whole forward of its kind has called the hook of every
//! layer in order. Every other forward waits for the whole load before it begins.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

/// One rank's hooks: the proven kinds of forwards, and the waits still to be enqueued in this step.
#[derive(Debug)]
pub struct LayerWaits {
    places: HashMap<String, usize>,
    /// Number of cuts needed before a layer, by the layer's place.
    needed: Vec<usize>,
    cuts: usize,
    allowed: bool,
    proven: BTreeSet<String>,
    /// The kind of this step's forward.
    mode: Option<String>,
    /// The layer of the next hook, if the forward may still prove its kind.
    next: Option<usize>,
    /// Cuts with an enqueued wait; all of them in a forward that waits for none.
    waited: usize,
    /// Blocks of this step's loads with waits between layers.
    awaited: Vec<u32>,
}

/// A forward's missed waits.
#[derive(Debug, Eq, PartialEq)]
pub struct Unawaited {
    /// Waits to enqueue now.
    pub cuts: Range<usize>,
    /// Blocks perhaps read too early.
    pub blocks: Vec<u32>,
}

// === impl LayerWaits ===

impl LayerWaits {
    /// Begins without a proven kind. `cut_layers`: number of layers of each cut. `allowed`: exactly one
    /// forward a step calls the hooks.
    pub fn new(layers: Vec<String>, cut_layers: &[usize], allowed: bool) -> Self {
        let cuts = cut_layers.len();
        let needed = cut_layers.iter().enumerate();
        Self {
            places: layers.into_iter().enumerate().map(|(place, name)| (name, place)).collect(),
            needed: needed.flat_map(|(cut, count)| std::iter::repeat_n(cut + 1, *count)).collect(),
            cuts,
            allowed,
            proven: BTreeSet::new(),
            mode: None,
            next: None,
            waited: cuts,
            awaited: Vec::new(),
        }
    }

    /// Returns the waits left by a raising forward: its loads write before this step does.
    pub fn begin_step(&mut self) -> Range<usize> {
        let left = self.wait_until(self.cuts);
        self.next = self.allowed.then_some(0);
        self.awaited.clear();
        left
    }

    /// True if a forward of this kind may wait cut by cut.
    pub fn permits(&self, mode: Option<&str>) -> bool {
        self.allowed && mode.is_some_and(|mode| self.proven.contains(mode))
    }

    /// Makes this step's forward wait for these blocks cut by cut.
    pub fn expect_blocks(&mut self, blocks: Vec<u32>) {
        self.waited = 0;
        self.awaited = blocks;
    }

    /// True if this step's forward still has waits to enqueue.
    pub fn is_waiting(&self) -> bool {
        self.waited < self.cuts
    }

    /// True if a further hook of this step's forward has an effect.
    pub fn minds_hooks(&self) -> bool {
        self.next.is_some() || self.is_waiting()
    }

    /// Returns the waits to enqueue before a layer, and whether [`LayerWaits::set_mode`] is to follow.
    pub fn reach_layer(&mut self, layer: &str) -> (Range<usize>, bool) {
        if !self.minds_hooks() {
            return (0..0, false);
        }
        let Some(&place) = self.places.get(layer) else { return (0..0, false) };
        let due = self.wait_until(self.needed[place]);
        let is_next = self.next == Some(place);
        if is_next {
            self.next = Some(place + 1);
        } else if self.next.is_some_and(|next| place > next) {
            self.next = None;
        }
        (due, is_next && place == 0)
    }

    /// Sets the kind of the running forward; `None` if it proves nothing.
    pub fn set_mode(&mut self, mode: Option<String>) {
        self.mode = mode.filter(|mode| !self.proven.contains(mode));
        if self.mode.is_none() {
            self.next = None;
        }
    }

    /// Returns the missed waits, `loading` being loads without an enqueued wait. After any, no later forward waits cut by cut.
    pub fn end_step(&mut self, loading: usize) -> Option<Unawaited> {
        if self.next.take() == Some(self.places.len()) {
            self.proven.extend(self.mode.take());
        }
        if !self.is_waiting() && loading == 0 {
            return None;
        }
        self.allowed = false;
        self.waited = 0;
        Some(Unawaited { cuts: self.wait_until(self.cuts), blocks: std::mem::take(&mut self.awaited) })
    }

    fn wait_until(&mut self, cuts: usize) -> Range<usize> {
        let from = self.waited;
        self.waited = from.max(cuts);
        from..self.waited
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYERS: [&str; 7] = ["0", "1", "2", "3", "4", "5", "6"];
    const CUT_LAYERS: [usize; 3] = [3, 3, 1];
    const CUTS: usize = CUT_LAYERS.len();
    const BLOCK: u32 = 9;

    /// A rank with forwards of one kind at a time.
    struct Rank {
        mode: Option<&'static str>,
        waits: LayerWaits,
        /// Loads without a wait for their last cut.
        loading: usize,
        waited: Vec<usize>,
    }

    // === impl Rank ===

    impl Rank {
        fn new(allowed: bool) -> Self {
            let waits = LayerWaits::new(LAYERS.map(str::to_owned).to_vec(), &CUT_LAYERS, allowed);
            Self { mode: Some("NONE"), waits, loading: 0, waited: Vec::new() }
        }

        fn wait(&mut self, cuts: Range<usize>) {
            self.loading = if cuts.clone().any(|cut| cut == CUTS - 1) { 0 } else { self.loading };
            self.waited.extend(cuts);
        }

        fn begin_step(&mut self) {
            self.waited.clear();
            let left = self.waits.begin_step();
            self.wait(left);
        }

        fn expect_load(&mut self) {
            if self.waits.permits(self.mode) {
                self.waits.expect_blocks(vec![BLOCK]);
                self.loading = 1;
            }
        }

        fn reach_layer(&mut self, layer: &str) {
            let (due, asks) = self.waits.reach_layer(layer);
            if asks {
                self.waits.set_mode(self.mode.map(str::to_owned));
            }
            self.wait(due);
        }

        /// One step with these hooks: the blocks perhaps read too early.
        fn step(&mut self, called: &[&str], loads: bool) -> Option<Vec<u32>> {
            self.begin_step();
            if loads {
                self.expect_load();
            }
            for layer in called {
                self.reach_layer(layer);
            }
            let unawaited = self.waits.end_step(self.loading)?;
            self.wait(unawaited.cuts);
            Some(unawaited.blocks)
        }
    }

    fn proven() -> Rank {
        let mut rank = Rank::new(true);
        assert_eq!(rank.step(&LAYERS, false), None);
        rank
    }

    #[test]
    fn hooks_have_no_effect_behind_the_first_of_a_proven_kind_without_loads() {
        let mut rank = proven();
        rank.begin_step();
        assert!(rank.waits.minds_hooks());
        rank.reach_layer("0");
        assert!(!rank.waits.minds_hooks());
        rank.begin_step();
        rank.expect_load();
        rank.reach_layer("0");
        assert!(rank.waits.minds_hooks());
    }

    #[test]
    fn a_wait_is_enqueued_at_the_first_layer_of_each_cut() {
        let mut rank = proven();
        rank.begin_step();
        rank.expect_load();
        let waited = LAYERS.map(|layer| {
            rank.reach_layer(layer);
            rank.waited.len()
        });
        assert_eq!(waited, [1, 1, 1, 2, 2, 2, 3]);
        assert_eq!((rank.waited, rank.waits.end_step(rank.loading)), (vec![0, 1, 2], None));
    }

    #[test]
    fn a_kind_is_proven_by_a_whole_forward_of_its_own() {
        assert!(!Rank::new(true).waits.permits(Some("NONE")));
        let mut rank = proven();
        assert!(rank.waits.permits(Some("NONE")) && !rank.waits.permits(Some("PIECEWISE")));
        rank.mode = Some("PIECEWISE");
        rank.step(&LAYERS, false);
        assert!(rank.waits.permits(Some("PIECEWISE")) && rank.waits.permits(Some("NONE")));
        assert!(!rank.waits.permits(None));
    }

    #[test]
    fn other_forwards_prove_nothing() {
        let backwards: Vec<&str> = LAYERS.into_iter().rev().collect();
        let left_out: Vec<&str> = LAYERS.into_iter().filter(|layer| *layer != "2").collect();
        let swapped = ["1", "0", "2", "3", "4", "5", "6"];
        for called in [&[], &LAYERS[..6], &LAYERS[1..], &backwards, &left_out, &swapped] {
            let mut rank = Rank::new(true);
            rank.step(called, false);
            assert!(!rank.waits.permits(Some("NONE")), "{called:?}");
        }
    }

    #[test]
    fn a_layer_that_comes_again_or_keeps_no_kv_changes_nothing() {
        let mut rank = Rank::new(true);
        rank.step(&["encoder", "0", "0", "1", "2", "3", "4", "5", "6", "6"], false);
        assert!(rank.waits.permits(Some("NONE")));
    }

    #[test]
    fn a_forward_of_no_kind_proves_nothing() {
        let mut rank = Rank::new(true);
        rank.mode = None;
        rank.step(&LAYERS, false);
        assert!(rank.waits.proven.is_empty());
    }

    #[test]
    fn hooks_that_are_not_serial_prove_nothing() {
        let mut rank = Rank::new(false);
        rank.step(&LAYERS, false);
        assert!(!rank.waits.permits(Some("NONE")));
    }

    #[test]
    fn hooks_outside_a_step_do_nothing() {
        let mut rank = Rank::new(true);
        for layer in LAYERS {
            rank.reach_layer(layer);
        }
        assert_eq!(rank.step(&[], false), None);
        assert!(!rank.waits.permits(Some("NONE")) && rank.waited.is_empty());
    }

    #[test]
    fn a_forward_that_did_not_wait_is_the_last_to_wait_cut_by_cut() {
        for called in [&LAYERS[..0], &LAYERS[..4], &LAYERS[..6]] {
            let mut rank = proven();
            assert_eq!(rank.step(called, true), Some(vec![BLOCK]), "{called:?}");
            assert_eq!((&rank.waited[rank.waited.len() - CUTS..], rank.loading), (&[0, 1, 2][..], 0));
            assert!(!rank.waits.permits(Some("NONE")));
            assert_eq!(rank.step(&LAYERS, false), None);
            assert!(!rank.waits.permits(Some("NONE")));
        }
    }

    #[test]
    fn a_left_out_layer_does_not_leave_out_a_wait() {
        let mut rank = proven();
        assert_eq!(rank.step(&["0", "1", "5", "6"], true), None);
        assert_eq!(rank.waited, [0, 1, 2]);
    }

    #[test]
    fn a_load_that_no_forward_was_to_wait_for_is_waited_for_at_the_end() {
        let mut rank = Rank::new(true);
        assert!(!rank.waits.minds_hooks());
        rank.loading = 1;
        assert_eq!(rank.step(&LAYERS, false), Some(Vec::new()));
        assert_eq!(rank.waited, [0, 1, 2]);
    }

    #[test]
    fn a_forward_that_raised_leaves_its_waits_to_the_next_step() {
        let mut rank = proven();
        rank.begin_step();
        rank.expect_load();
        rank.reach_layer("0");
        rank.begin_step();
        assert_eq!((&rank.waited[..], rank.waits.is_waiting()), (&[1, 2][..], false));
        assert!(rank.waits.permits(Some("NONE")));
    }
}
