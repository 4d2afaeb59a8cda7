//! Queries for the last kept key: a state serves its own boundary alone, and needs none of the states before it.
//!
//! The query becomes a question for one key. Its block lies in memory, or can be brought there as any other block. If the block does
//! not come, the answer is the last key below it in memory: nothing is waited for twice.

use shm_protocol::key::BlockHash;

use super::{Base, Binding, Context, Queries, Question};

// === impl Question ===

impl Question {
    /// Returns the question for one key, counted from the query's first one. Without a key it asks for
    /// nothing.
    fn for_key(self, first: u32, key: Option<usize>) -> Self {
        match key {
            Some(key) => Self { from: first + key as u32, count: 1, ..self },
            None => Self { from: first, count: 0, ..self },
        }
    }
}

// === impl Queries ===

impl Queries {
    /// Returns the question for the last kept key if the query asks for it, otherwise the question itself.
    ///
    /// An engine waiting for another one asks for the last key first, kept or not: the other one is to
    /// produce it.
    pub(super) fn narrow(&self, question: Question, binding: &Binding, base: &Base) -> Question {
        let Some(first) = question.first else { return question };
        let keys = self.named(question, first);
        if question.awaits {
            return question.for_key(first, keys.len().checked_sub(1));
        }
        let kept = in_memory(keys, binding, &base.cx);
        let is_near =
            |at: &usize| kept[*at] || base.sources.may_arrive(binding, &keys[*at..=*at], false, &base.cx);
        question.for_key(first, (0..keys.len()).rev().find(is_near))
    }

    /// Returns the question for the last key in memory before the key without a block.
    pub(super) fn narrow_below(&self, question: Question, binding: &Binding, cx: &Context) -> Question {
        let Some(first) = question.first else { return question };
        let keys = self.named(question, first);
        let keys = &keys[..keys.len().min((question.from - first) as usize)];
        question.for_key(first, in_memory(keys, binding, cx).iter().rposition(|kept| *kept))
    }

    /// Returns the keys from the query's first one up to the end of the question.
    fn named(&self, question: Question, first: u32) -> &[BlockHash] {
        let log = self.log(question.session, question.log);
        log.some(first, question.from + question.count - first)
    }
}

/// Returns true for each key in memory.
fn in_memory(keys: &[BlockHash], binding: &Binding, cx: &Context) -> Vec<bool> {
    let mut kept = Vec::with_capacity(keys.len());
    cx.dram.lookup(binding.namespace, keys, &mut kept);
    kept
}
