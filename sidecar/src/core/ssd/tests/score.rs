//! Scores of prompts that a disk has.

use super::*;
use crate::core::tests::score::score_blocks;

#[test]
fn blocks_on_a_disk_are_counted_with_those_in_memory_and_not_read() {
    let mut scene = Scene::new(SsdAdmission::All);
    scene.write(0..7);
    scene.flood();
    scene.engine.out.clear();
    let score = |scene: &Scene| {
        let places = score_blocks(&scene.engine.core, NAMESPACE, (BLOCK_BYTES, 100), 0..10, 0);
        (places.memory, places.disk, places.found)
    };
    assert_eq!(score(&scene), (0, 700, 700));
    assert!(scene.reads().is_empty() && scene.engine.out.is_empty());
    scene.save(7..9);
    assert_eq!(score(&scene), (0, 900, 900), "the last two are in memory");
    scene.save(0..2);
    assert_eq!(score(&scene), (200, 900, 900));
}
