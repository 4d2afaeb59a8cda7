use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

/// Prints of one shard with few distinct homes, so buckets overflow and wrap around.
fn crowded(number: u32) -> Print {
    let high = number % 5;
    Print(u64::from(0u32.wrapping_sub(high) << 24 | number << 1))
}

fn check(index: &Index, model: &HashMap<u32, Print>, prints: u32) {
    assert_eq!(index.len(), model.len());
    for number in 0..prints {
        let print = crowded(number);
        let found = index.find(print, |entry| entry == number);
        assert_eq!(found.is_some(), model.contains_key(&number), "entry {number}");
        let glance = index.home(print).glance(print);
        if !glance.unsure {
            let held = model.get(&glance.entry).map(|print| print.tag());
            assert_eq!(held, model.contains_key(&number).then_some(print.tag()), "entry {number}");
        }
    }
}

proptest! {
    #[test]
    fn an_index_is_a_map(steps in prop::collection::vec((any::<bool>(), 0..120u32), 0..400)) {
        let (mut index, mut model) = (Index::new(), HashMap::new());
        for (insert, number) in steps {
            let print = crowded(number);
            if insert && !model.contains_key(&number) {
                index.insert(print, number);
                model.insert(number, print);
            } else if !insert {
                prop_assert_eq!(index.remove(print, number), model.remove(&number).is_some());
            }
        }
        check(&index, &model, 120);
    }
}

#[test]
fn equal_tags_are_told_apart_by_the_caller() {
    let mut index = Index::new();
    let print = Print(0x1234_5678_9abc_def1);
    for entry in 0..20 {
        index.insert(print, entry);
    }
    assert!(index.home(print).glance(print).unsure);
    assert!((0..20).all(|entry| index.find(print, |other| other == entry) == Some(entry)));
    assert_eq!(index.find(print, |_| false), None);
    assert!((0..20).all(|entry| index.remove(print, entry)));
    assert_eq!(index.home(print).glance(print), Glance { entry: NO_ENTRY, unsure: false });
}

#[test]
fn every_part_of_a_key_changes_its_print() {
    let base = Print::new(1, 2, &BlockHash([0; 32]));
    assert_ne!(base, Print::new(2, 1, &BlockHash([0; 32])));
    assert_ne!(base, Print::new(1, 3, &BlockHash([0; 32])));
    for byte in 0..32 {
        let mut hash = [0; 32];
        hash[byte] = 1;
        assert_ne!(base, Print::new(1, 2, &BlockHash(hash)), "byte {byte}");
    }
}
