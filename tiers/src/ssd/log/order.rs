//! The order in which kept blocks go, and the limits for their units.
//!
//! A block also kept in DRAM is a copy. A block evicted from DRAM keeps its standing and lies in a list of
//! its sort: blocks enter in the order of DRAM's evictions, so in each list a parent goes after its children.

use super::table::Table;
use crate::dram::Judge;
use crate::list::{List, Spot};
use crate::standing::{SORTS, Standing};

/// Blocks of the namespaces of one quota, or of none.
#[derive(Debug, Default)]
struct Group {
    /// Most units of the group.
    units_max: Option<u64>,
    units: u64,
    copies: List,
    sorts: [List; SORTS],
}

#[derive(Debug)]
pub(super) struct Order {
    groups: Vec<Group>,
    /// Units of all blocks, and those of copies.
    units: u64,
    copied: u64,
}

// === impl Order ===

impl Order {
    pub(super) fn new() -> Self {
        Self { groups: vec![Group::default()], units: 0, copied: 0 }
    }

    /// Adds a group with a limit of units.
    pub(super) fn add_group(&mut self, units_max: u64) {
        self.groups.push(Group { units_max: Some(units_max), ..Group::default() });
    }

    /// Returns the units of all blocks.
    pub(super) fn units(&self) -> u64 {
        self.units
    }

    fn list(&mut self, group: usize, standing: Standing) -> &mut List {
        let group = &mut self.groups[group];
        if standing == Standing::ABOVE {
            &mut group.copies
        } else {
            &mut group.sorts[standing.sort().index()]
        }
    }

    /// Adds a block of no list.
    pub(super) fn enter(&mut self, table: &mut Table, id: u32, group: usize, units: u32, spot: Spot) {
        let standing = table.get(id).standing;
        self.list(group, standing).push(table, id, spot);
        self.count(group, standing, i64::from(units));
    }

    pub(super) fn leave(&mut self, table: &mut Table, id: u32, group: usize, units: u32) {
        let standing = table.get(id).standing;
        self.list(group, standing).remove(table, id);
        self.count(group, standing, -i64::from(units));
    }

    fn count(&mut self, group: usize, standing: Standing, units: i64) {
        let copied = if standing == Standing::ABOVE { units } else { 0 };
        for (count, more) in
            [(&mut self.groups[group].units, units), (&mut self.units, units), (&mut self.copied, copied)]
        {
            *count = count.checked_add_signed(more).expect("each block that left had entered");
        }
    }

    /// True if a group would exceed its limit with so many units more.
    pub(super) fn is_over(&self, group: usize, more: u64) -> bool {
        let group = &self.groups[group];
        group.units_max.is_some_and(|most| group.units.saturating_add(more) > most)
    }

    /// Returns the next block to go, of one group or of all: while copies exceed their limit, the oldest
    /// copy.
    pub(super) fn next(
        &self,
        table: &Table,
        judge: Judge<'_>,
        of: Option<usize>,
        copies_max: Option<u64>,
    ) -> Option<u32> {
        let groups = || self.groups.iter().enumerate().filter(move |(at, _)| of.is_none_or(|of| of == *at));
        let copy = || {
            groups().max_by_key(|(_, group)| group.copies.len()).and_then(|(_, group)| group.copies.tail())
        };
        if copies_max.is_some_and(|most| self.copied > most)
            && let Some(copy) = copy()
        {
            return Some(copy);
        }
        let sorts = (0..SORTS).rev();
        let tails = sorts.flat_map(|sort| groups().filter_map(move |(_, group)| group.sorts[sort].tail()));
        judge.least(tails.map(|id| (id, table.get(id).standing))).or_else(copy)
    }
}
