//! Moving the blocks of a chain to the heads of their lists.

use super::{Class, ListPlace, Slab, SlotEntry, Standing};
use crate::ledger::HolderId;
use crate::list::{List, ListRun, Spot};

/// One of the policy's lists: its class in 16 bits, its holder in 8, and its place among the holder's lists in 8. Compared as
/// one word.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
struct Shelf(u32);

/// Neighbours on their way from a list, if they are in one, to the head of a list.
#[derive(Copy, Clone, Debug)]
struct Move {
    run: ListRun,
    from: Option<Shelf>,
    to: Shelf,
}

// === impl Shelf ===

impl Shelf {
    /// Returns the policy's list of an entry, if it is in one.
    #[inline]
    fn of_entry(entry: &SlotEntry, class: u16) -> Option<Self> {
        let holder = entry.claims.holder().byte();
        let shelf = |list| Self(u32::from(class) << 16 | u32::from(holder) << 8 | list as u32);
        entry.policy_list().map(shelf)
    }

    fn list_in(self, classes: &mut [Class]) -> &mut List {
        let [list, holder, ..] = self.0.to_le_bytes();
        let queues = &mut classes[(self.0 >> 16) as usize].queues;
        queues.holder_list(HolderId::from_byte(holder), list.into())
    }
}

// === impl Slab: raising ===

impl Slab {
    /// Moves entries, none of them in a free list, to the heads of lists of the policy, one after the other.
    /// `standing` returns the new standing and place of each. Most are a chain moved so before: neighbours
    /// move together, and are not linked again.
    pub(crate) fn raise(
        &mut self,
        ids: &[u32],
        mut standing: impl FnMut(&SlotEntry) -> (Standing, ListPlace),
    ) {
        let mut moving: Option<Move> = None;
        for id in ids {
            let class = self.segments[self.entries.segment(*id)].class;
            let entry = self.entries.get_mut(*id);
            debug_assert!(entry.list_place() != ListPlace::Free, "a free slot has no sort");
            let from = Shelf::of_entry(entry, class);
            if let Some(quotas) = &mut self.quotas {
                quotas.leave_list(*id, entry);
            }
            let (standing, place) = standing(entry);
            entry.standing = standing;
            entry.set_place(place);
            if let Some(quotas) = &mut self.quotas {
                quotas.entered(*id, entry, Spot::Head);
            }
            let to = Shelf::of_entry(entry, class).expect("its new place is a list of the policy");
            let link = entry.link;
            let joins = |other: &mut Move| {
                from.is_some() && (other.from, other.to) == (from, to) && other.run.extend(*id, link)
            };
            if !moving.as_mut().is_some_and(joins) {
                let run = ListRun::of_one(*id);
                moving.replace(Move { run, from, to }).into_iter().for_each(|whole| self.carry_out(whole));
            }
        }
        moving.into_iter().for_each(|whole| self.carry_out(whole));
    }

    fn carry_out(&mut self, Move { run, from, to }: Move) {
        let (entries, classes) = (&mut self.entries, &mut self.classes);
        if from == Some(to) {
            return to.list_in(classes).raise_run(entries, run);
        }
        from.into_iter().for_each(|from| from.list_in(classes).remove_run(entries, run));
        to.list_in(classes).push_run(entries, run);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use shm_protocol::pool::Geometry;

    use super::*;
    use crate::entries::PolicyLists;
    use crate::list::{LinkTable, NIL};
    use crate::quota::QuotaId;
    use crate::standing::Sort;

    const SEGMENT_BYTES: u64 = 4 << 20;
    const BLOCK_BYTES: u64 = 64 << 10;
    const BLOCKS: u32 = 24;

    /// Blocks of two holders; one in three is charged to a quota.
    fn slab() -> (Slab, QuotaId) {
        let mut slab = Slab::new(SEGMENT_BYTES, 1);
        let quota = slab.quotas_mut().add_quota(u64::MAX);
        let class = slab.class(Geometry::new(SEGMENT_BYTES, BLOCK_BYTES).unwrap()).unwrap();
        slab.add_fresh(0);
        slab.assign_fresh(class).unwrap();
        for id in 0..BLOCKS {
            let holder = HolderId::from_byte((id % 2) as u8);
            slab.move_to(id, ListPlace::Detached);
            slab.entries.get_mut(id).claims.set_holder(holder);
            if id % 3 == 0 {
                slab.quotas.as_mut().unwrap().charge(id, quota, holder, BLOCK_BYTES);
            }
            slab.keep(id, Standing::NONE, Spot::Head);
        }
        (slab, quota)
    }

    /// The elements of every list, the last ones first.
    fn elements(queues: &PolicyLists, table: &mut impl LinkTable) -> Vec<Vec<u32>> {
        let mut of = |list: &List| {
            let previous = |id: &u32| Some(table.link(*id).previous).filter(|id| *id != NIL);
            // At most the number of blocks: broken lists may have no end.
            let ids: Vec<u32> =
                std::iter::successors(list.tail(), previous).take(BLOCKS as usize + 1).collect();
            assert_eq!(ids.len(), list.len() as usize);
            ids
        };
        queues.holders().flat_map(|holder| queues.holder_lists(holder)).map(&mut of).collect()
    }

    fn lists((slab, quota): &mut (Slab, QuotaId)) -> Vec<Vec<u32>> {
        let mut lists = elements(&slab.classes[0].queues, &mut slab.entries);
        let quotas = slab.quotas.as_mut().unwrap();
        let mut members = quotas.members.clone();
        lists.extend(elements(quotas.queues(*quota), &mut members));
        lists
    }

    proptest! {
        #[test]
        fn together_is_one_after_the_other(
            steps in prop::collection::vec(
                (prop::collection::vec(0..BLOCKS, 1..8), 0..3u8, any::<bool>(), any::<bool>()),
                0..60,
            )
        ) {
            let (mut together, mut singly) = (slab(), slab());
            let mut chains: Vec<Vec<u32>> = vec![];
            for (ids, turn, leave, on_device) in steps {
                if leave {
                    together.0.move_to(ids[0], ListPlace::Detached);
                    singly.0.move_to(ids[0], ListPlace::Detached);
                    continue;
                }
                // A chain moved before is moved again, with the new ones.
                let again = chains.get(turn as usize).cloned().unwrap_or_default();
                let chain = [again, ids].concat();
                let sort = Sort::of_turn(0, 1 + turn);
                let standing = |entry: &SlotEntry| {
                    let before = entry.standing.sort();
                    let place = if on_device { ListPlace::FirstOut } else { ListPlace::Kept };
                    (Standing::new(if before.index() > sort.index() { before } else { sort }, 0), place)
                };
                together.0.raise(&chain, standing);
                for id in &chain {
                    let (standing, place) = standing(singly.0.entries.get(*id));
                    singly.0.put(*id, standing, place, Spot::Head);
                }
                prop_assert_eq!(lists(&mut together), lists(&mut singly));
                chains.insert(0, chain);
            }
        }
    }
}
