//! Doubly linked lists whose links lie in the elements, in a table of another owner.

pub(crate) const NIL: u32 = u32::MAX;

/// The links of one element.
#[derive(Copy, Clone, Debug)]
pub(crate) struct Link {
    pub(crate) previous: u32,
    pub(crate) next: u32,
}

/// A table of elements with links. An element is in at most one list at a time; the table's owner ensures it.
pub(crate) trait Links {
    /// Returns the links of element `id`.
    fn link(&mut self, id: u32) -> &mut Link;
}

/// One list: elements enter at the head and leave at the tail, or anywhere.
#[derive(Clone, Debug)]
pub(crate) struct List {
    head: u32,
    tail: u32,
    len: u32,
}

/// Neighbours in a list, from the one nearest to its head to the one nearest to its tail.
#[derive(Copy, Clone, Debug)]
pub(crate) struct Run {
    first: u32,
    last: u32,
    len: u32,
}

/// A place in a list.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum Spot {
    Head,
    Tail,
    /// Right behind another element, towards the tail.
    Behind(u32),
}

// === impl Link ===

impl Default for Link {
    fn default() -> Self {
        Self { previous: NIL, next: NIL }
    }
}

// === impl Spot ===

impl Spot {
    /// Returns the same spot in a list of only those elements for which `is_in` is true: its head, if the
    /// element ahead is not in it.
    pub(crate) fn among(self, is_in: impl Fn(u32) -> bool) -> Self {
        match self {
            Self::Behind(other) if !is_in(other) => Self::Head,
            spot => spot,
        }
    }
}

// === impl Run ===

impl Run {
    pub(crate) fn of(id: u32) -> Self {
        Self { first: id, last: id, len: 1 }
    }

    /// Adds the element before the run in its list. Returns false if `ahead` is not the run's neighbour.
    #[inline]
    pub(crate) fn extend(&mut self, ahead: u32, link: Link) -> bool {
        let neighbours = link.next == self.first;
        if neighbours {
            (self.first, self.len) = (ahead, self.len + 1);
        }
        neighbours
    }
}

// === impl List ===

impl Default for List {
    fn default() -> Self {
        Self { head: NIL, tail: NIL, len: 0 }
    }
}

impl List {
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// Returns the last added element.
    pub(crate) fn head(&self) -> Option<u32> {
        (self.head != NIL).then_some(self.head)
    }

    /// Returns the element longest in the list.
    pub(crate) fn tail(&self) -> Option<u32> {
        (self.tail != NIL).then_some(self.tail)
    }

    /// Adds an element of no list at the head.
    pub(crate) fn push_head(&mut self, table: &mut impl Links, id: u32) {
        self.push_run(table, Run::of(id));
    }

    /// Adds elements of no list, linked to each other, at the head.
    pub(crate) fn push_run(&mut self, table: &mut impl Links, run: Run) {
        table.link(run.first).previous = NIL;
        table.link(run.last).next = self.head;
        match self.head {
            NIL => self.tail = run.last,
            head => table.link(head).previous = run.last,
        }
        self.head = run.first;
        self.len += run.len;
    }

    /// Moves elements of this list to its head.
    pub(crate) fn raise_run(&mut self, table: &mut impl Links, run: Run) {
        if self.head != run.first {
            self.remove_run(table, run);
            self.push_run(table, run);
        }
    }

    /// Adds an element of no list.
    pub(crate) fn push(&mut self, table: &mut impl Links, id: u32, spot: Spot) {
        match (spot, self.tail()) {
            (Spot::Behind(ahead), _) | (Spot::Tail, Some(ahead)) => self.push_behind(table, id, ahead),
            (Spot::Head, _) | (Spot::Tail, None) => self.push_head(table, id),
        }
    }

    fn push_behind(&mut self, table: &mut impl Links, id: u32, ahead: u32) {
        let behind = std::mem::replace(&mut table.link(ahead).next, id);
        *table.link(id) = Link { previous: ahead, next: behind };
        match behind {
            NIL => self.tail = id,
            behind => table.link(behind).previous = id,
        }
        self.len += 1;
    }

    /// Takes an element out of this list; it must be in it.
    pub(crate) fn remove(&mut self, table: &mut impl Links, id: u32) {
        self.remove_run(table, Run::of(id));
    }

    /// Takes elements out of this list; they must be in it, and stay linked to each other.
    pub(crate) fn remove_run(&mut self, table: &mut impl Links, run: Run) {
        let (previous, next) = (table.link(run.first).previous, table.link(run.last).next);
        match previous {
            NIL => self.head = next,
            previous => table.link(previous).next = next,
        }
        match next {
            NIL => self.tail = previous,
            next => table.link(next).previous = previous,
        }
        self.len -= run.len;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    struct Table(Vec<Link>);

    impl Links for Table {
        fn link(&mut self, id: u32) -> &mut Link {
            &mut self.0[id as usize]
        }
    }

    proptest! {
        #[test]
        fn a_list_is_a_deque_with_removal(steps in prop::collection::vec((0..6u8, 0..16u32, 0..16u32), 0..200)) {
            let (mut table, mut list, mut model) = (Table(vec![Link::default(); 16]), List::default(), VecDeque::new());
            for (action, id, ahead) in steps {
                let inside = model.iter().position(|other| *other == id);
                match (action, inside) {
                    (0, None) => {
                        list.push_head(&mut table, id);
                        model.push_front(id);
                    }
                    (1, Some(at)) => {
                        list.remove(&mut table, id);
                        model.remove(at);
                    }
                    (4, None) => {
                        list.push(&mut table, id, Spot::Tail);
                        model.push_back(id);
                    }
                    (3, None) if model.contains(&ahead) => {
                        list.push(&mut table, id, Spot::Behind(ahead));
                        let at = model.iter().position(|other| *other == ahead).expect("contained");
                        model.insert(at + 1, id);
                    }
                    (5, Some(at)) => {
                        let from = at.saturating_sub(ahead as usize);
                        let mut run = Run::of(id);
                        for ahead in model.range(from..at).rev() {
                            assert!(run.extend(*ahead, *table.link(*ahead)));
                        }
                        prop_assert!(!run.extend(id, *table.link(id)), "it is no neighbour of its own");
                        list.raise_run(&mut table, run);
                        let moved: Vec<u32> = model.drain(from..=at).collect();
                        moved.into_iter().rev().for_each(|id| model.push_front(id));
                    }
                    (2, _) if !model.is_empty() => {
                        list.remove(&mut table, list.tail().expect("not empty"));
                        model.pop_back();
                    }
                    _ => {}
                }
                prop_assert_eq!(list.tail(), model.back().copied());
                let forwards = std::iter::successors(list.tail(), |id| Some(table.0[*id as usize].previous).filter(|id| *id != NIL));
                prop_assert!(forwards.eq(model.iter().rev().copied()));
                prop_assert_eq!(list.len() as usize, model.len());
            }
        }
    }
}
