//! The order of the next evictions, true as long as no block is used in between.

use std::collections::{HashMap, HashSet};

use super::{Policy, SORTS_THAT_GO, lists_that_go};
use crate::ledger::HolderSet;
use crate::list::NIL;
use crate::slab::{Among, Slab};

/// Finds one block after another in the order of eviction, and evicts none.
struct EvictionOrder<'a> {
    policy: &'a Policy,
    slab: &'a Slab,
    among: Among,
    /// The next unpinned block of each list.
    tails: Vec<Option<u32>>,
    /// Blocks passed over because of their children; `childless` has those without remaining children.
    passed: HashSet<u32>,
    childless: Vec<u32>,
    /// Remaining children of each parent with gone ones.
    left: HashMap<u32, u32>,
}

// === impl Policy ===

impl Policy {
    /// Returns the next blocks of [`Policy::next`], in its order, as long as no block is used in between.
    pub(crate) fn order<'a>(
        &'a self,
        slab: &'a Slab,
        among: Among,
        losers: HolderSet,
    ) -> impl Iterator<Item = u32> + 'a {
        let queues = slab.queues(among);
        let holders = queues.holders().filter(move |id| losers.has(*id));
        let parents = holders.clone().map(|id| queues.holder_lists(id)[SORTS_THAT_GO].tail());
        let parents = parents.flat_map(|tail| std::iter::successors(tail, |id| slab.ahead(among, *id)));
        let tails = lists_that_go()
            .flat_map(|list| holders.clone().map(move |id| queues.holder_lists(id)[list].tail()));
        let mut order = EvictionOrder {
            policy: self,
            slab,
            among,
            tails: tails.collect(),
            passed: parents.collect(),
            childless: Vec::new(),
            left: HashMap::new(),
        };
        for at in 0..order.tails.len() {
            order.tails[at] = order.unpinned(order.tails[at]);
        }
        std::iter::from_fn(move || order.next())
    }
}

// === impl EvictionOrder ===

impl EvictionOrder<'_> {
    fn unpinned(&self, mut entry: Option<u32>) -> Option<u32> {
        while let Some(pinned) = entry.filter(|id| self.slab.entries.get(*id).claims.pins() > 0) {
            entry = self.slab.ahead(self.among, pinned);
        }
        entry
    }

    fn children(&self, id: u32) -> u32 {
        self.left.get(&id).copied().unwrap_or_else(|| self.slab.children(id))
    }

    fn next(&mut self) -> Option<u32> {
        loop {
            // A passed parent takes the place of its last child, so it goes next.
            if let Some(first) = self.childless.pop() {
                return Some(self.gone(first));
            }
            let tails = self.tails.iter().flatten().copied();
            let first = self.policy.first(self.slab, tails)?;
            let at = self.tails.iter().position(|tail| *tail == Some(first)).expect("it is one of them");
            self.tails[at] = self.unpinned(self.slab.ahead(self.among, first));
            if self.children(first) == 0 {
                return Some(self.gone(first));
            }
            self.passed.insert(first);
        }
    }

    /// Records that a block goes; its parent may follow.
    fn gone(&mut self, id: u32) -> u32 {
        let parent = self.slab.entries.get(id).parent;
        if parent != NIL {
            let left = self.children(parent).saturating_sub(1);
            self.left.insert(parent, left);
            let is_free = self.slab.entries.get_or_vacant(parent).claims.pins() == 0;
            if left == 0 && is_free && self.passed.contains(&parent) {
                self.childless.push(parent);
            }
        }
        id
    }
}
