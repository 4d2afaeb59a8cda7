//! Lists of a manifest that get items, and lose them again.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::yaml::Node;

/// The place behind all items of a list.
pub(super) const LAST: usize = usize::MAX;

/// Lists without items, by name, before.
pub(super) type Lists = BTreeMap<String, Before>;

/// A list or a map without entries, before.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Before {
    Empty,
    /// A name without a value.
    Null,
}

/// Keeps some items of a list; a list without items becomes again as it was.
pub(super) fn retain_items(map: &mut Node, key: &str, lists: &Lists, is_kept: impl Fn(&Node) -> bool) {
    let Some(Node::List(items)) = map.get_mut(key) else { return };
    items.retain(is_kept);
    if items.is_empty() {
        match lists.get(key) {
            Some(Before::Empty) => {}
            Some(Before::Null) => map.set_entry(key, Node::plain("")),
            None => drop(map.take_key(key)),
        }
    }
}

/// Adds items to a list at a place, or behind all others; `lists` gets the state of a list without items.
pub(super) fn extend_list(
    map: &mut Node,
    key: &str,
    added: Vec<Node>,
    place: usize,
    lists: &mut Lists,
) -> Result<(), String> {
    match map.get_mut(key) {
        Some(Node::List(items)) => {
            if items.is_empty() {
                lists.insert(key.to_owned(), Before::Empty);
            }
            let place = place.min(items.len());
            items.splice(place..place, added);
        }
        Some(value) if !value.is_null() => return Err(format!("its {key} is no list: write one")),
        value => {
            if value.is_some() {
                lists.insert(key.to_owned(), Before::Null);
            }
            map.set_entry(key, Node::List(added));
        }
    }
    Ok(())
}
