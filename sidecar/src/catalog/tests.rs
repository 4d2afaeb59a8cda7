//! Tests of the catalog while workers connect and leave.

use shm_protocol::handshake::{BlockRegion, HelloDigest};

use super::*;

/// One region for each block of so many bytes.
fn regions(bytes: u64) -> Vec<BlockRegion> {
    vec![BlockRegion { fd: 0, offset: 0, stride: bytes, bytes }]
}

fn worker(changed: &[(&str, &str)]) -> WorkerHello {
    let usual = [("model", "tiny"), ("weights", "w"), ("none_hash", "aa"), ("page_form", "tokens=32")];
    let facts = usual.iter().chain(changed).map(|(name, value)| ((*name).into(), (*value).into()));
    WorkerHello {
        shards: 2,
        blocks: 8,
        regions: regions(4096),
        facts: facts.collect(),
        ..WorkerHello::default()
    }
}

fn examine(catalog: &Catalog, engine: &str, worker: &WorkerHello) -> Result<Option<String>, String> {
    catalog.examine(engine, worker, EngineBlocks::of_worker(2, worker).as_ref())
}

fn enter(catalog: &mut Catalog, session: SessionId, engine: &str, worker: &WorkerHello) -> bool {
    catalog.enter_sessions(&[session], engine, &EngineBlocks::of_worker(2, worker).unwrap())
}

#[test]
fn a_near_miss_is_told_to_the_first_rank_of_an_engine_and_to_engines_of_the_same_model_alone() {
    let mut catalog = Catalog::default();
    let (ours, seeded) = (worker(&[]), worker(&[("none_hash", "bb")]));
    assert_eq!(examine(&catalog, "a", &ours), Ok(None));
    assert!(enter(&mut catalog, 1, "a", &ours));
    let note = examine(&catalog, "b", &seeded).unwrap().unwrap();
    assert!(note.contains("same model and layout") && note.contains("set PYTHONHASHSEED"), "{note}");
    assert!(note.contains("which is served here"), "{note}");
    assert!(enter(&mut catalog, 2, "b", &seeded));
    let second = WorkerHello { rank: 1, ..seeded };
    assert_eq!(examine(&catalog, "b", &second), Ok(None), "only the first rank gets the hint");
    assert!(!enter(&mut catalog, 3, "b", &second));
    let stranger = worker(&[("model", "other"), ("weights", "v")]);
    assert_eq!(examine(&catalog, "c", &stranger), Ok(None));
    let near_miss = catalog.near_miss("c", namespace::digest_facts(&ours.facts), &ours.facts);
    assert_eq!(examine(&catalog, "c", &ours), Ok(near_miss));
}

#[test]
fn cache_groups_of_one_engine_are_no_near_misses_of_each_other() {
    let mut catalog = Catalog::default();
    let (full, windows) = (worker(&[("group_kind", "full")]), worker(&[("group_kind", "window 64 x2")]));
    enter(&mut catalog, 1, "a group 0", &windows);
    assert_eq!(examine(&catalog, "a group 1", &full), Ok(None));
    let note = examine(&catalog, "b", &full).unwrap().unwrap();
    assert!(note.contains("group_kind"), "{note}");
}

#[test]
fn the_closest_namespace_is_named_and_a_mistake_that_is_over_is_not() {
    let mut catalog = Catalog::default();
    let far = worker(&[("none_hash", "bb"), ("dtype", "float32"), ("page_form", "tokens=16")]);
    let near = worker(&[("none_hash", "cc")]);
    enter(&mut catalog, 1, "a", &far);
    enter(&mut catalog, 2, "b", &near);
    let ours = worker(&[]);
    let note = examine(&catalog, "c", &ours).unwrap().unwrap();
    assert!(
        note.contains(&namespace::digest_facts(&near.facts).to_string()) && note.contains("'cc'"),
        "{note}"
    );
    enter(&mut catalog, 3, "c", &ours);
    (1..=3).for_each(|session| catalog.leave_session(session));
    assert_eq!(
        examine(&catalog, "c", &ours),
        Ok(None),
        "the namespace is known, and the others have no engines"
    );
    let fresh = worker(&[("none_hash", "dd")]);
    let note = examine(&catalog, "d", &fresh).unwrap().unwrap();
    assert!(note.contains("which was served here"), "{note}");
}

#[test]
fn an_engine_that_claims_another_namespace_is_refused_with_both_descriptors() {
    let mut catalog = Catalog::default();
    let theirs = worker(&[]);
    enter(&mut catalog, 1, "a", &theirs);
    let digest = namespace::digest_facts(&theirs.facts).to_string();
    assert_eq!(examine(&catalog, "b", &WorkerHello { expects: Some(digest.clone()), ..theirs }), Ok(None));
    let other = WorkerHello { expects: Some(digest.clone()), ..worker(&[("page_form", "tokens=16")]) };
    let reason = examine(&catalog, "b", &other).unwrap_err();
    assert!(reason.contains("page_form is 'tokens=16' here and 'tokens=32' there"), "{reason}");
    assert!(reason.contains("use the same layout") && reason.contains(&digest), "{reason}");
    let unseen = WorkerHello { expects: Some("0".repeat(32)), ..other };
    assert!(examine(&catalog, "b", &unseen).unwrap_err().contains("has not seen"));
}

#[test]
fn blocks_of_another_size_or_of_other_shards_are_refused_with_both_numbers() {
    let mut catalog = Catalog::default();
    enter(&mut catalog, 1, "a", &worker(&[]));
    catalog.leave_session(1);
    let reason = examine(&catalog, "b", &WorkerHello { regions: regions(1024), ..worker(&[]) }).unwrap_err();
    assert!(reason.contains("8192 bytes in 2 shards") && reason.contains("2048 bytes in 2"), "{reason}");
    let whole = WorkerHello { shards: 1, regions: regions(8192), ..worker(&[]) };
    let reason = examine(&catalog, "b", &whole).unwrap_err();
    assert!(reason.contains("8192 bytes in 2 shards") && reason.contains("8192 bytes in 1"), "{reason}");
    assert!(reason.contains("pillion.salt"), "{reason}");
    let parted = BlockRegion { fd: 0, offset: 0, stride: 4096, bytes: 2048 };
    let parted = WorkerHello { regions: vec![parted; 2], ..worker(&[]) };
    assert_eq!(examine(&catalog, "b", &parted), Ok(None), "the block has as many bytes");
}

#[test]
fn entries_count_engines_and_old_namespaces_make_room() {
    let mut catalog = Catalog::default();
    enter(&mut catalog, 1, "a", &worker(&[]));
    enter(&mut catalog, 2, "a", &WorkerHello { rank: 1, ..worker(&[]) });
    enter(&mut catalog, 3, "b", &worker(&[]));
    let entries = catalog.entries(&Levels::default());
    let [(digest, entry)] = entries.as_slice() else { panic!("{entries:?}") };
    assert_eq!((entry.engines, entry.block_bytes), (2, 8192));
    assert_eq!(*digest, namespace::digest_facts(&entry.facts));
    catalog.leave_session(3);
    assert_eq!(catalog.entries(&Levels::default())[0].1.engines, 1);
    let large = "x".repeat(FACTS_BYTES_MAX / 4);
    for number in 0..8 {
        let worker = worker(&[("number", &number.to_string()), ("large", &large)]);
        enter(&mut catalog, 10 + number, "big", &worker);
        catalog.leave_session(10 + number);
    }
    let entries = catalog.entries(&Levels::default());
    assert_eq!(entries.len(), 4, "the namespace with an engine, and three idle ones");
    assert!(entries.iter().any(|entry| entry.1.engines == 1));
    assert!(catalog.facts_bytes <= FACTS_BYTES_MAX);
}

#[test]
fn an_engine_whose_weights_are_known_together_enters_once_it_is_bound() {
    let mut catalog = Catalog::default();
    let ours = WorkerHello { live_weights: Some(HelloDigest([7; 16])), ..worker(&[]) };
    assert!(EngineBlocks::of_worker(2, &ours).is_none() && EngineBlocks::of_worker(1, &ours).is_some());
    let bound = |live| {
        let facts = namespace::complete_facts(&ours.facts, namespace::weights_live([Some(live); 2]));
        EngineBlocks { facts: Arc::new(facts), ..EngineBlocks::of_worker(1, &ours).unwrap() }
    };
    assert!(catalog.enter_sessions(&[1, 2], "a", &bound([7; 16])));
    assert_eq!(catalog.note_near_miss("a", &bound([7; 16]).facts), None);
    let note = catalog.note_near_miss("b", &bound([8; 16]).facts).unwrap();
    assert!(note.contains("weights_live is") && note.contains("the weights that run differ"), "{note}");
    assert!(catalog.enter_sessions(&[1, 2], "a", &bound([8; 16])), "its weights changed");
    let engines: Vec<usize> =
        catalog.entries(&Levels::default()).iter().map(|entry| entry.1.engines).collect();
    assert_eq!(engines.iter().sum::<usize>(), 1, "it left its previous namespace");
    let reason = examine(&catalog, "c", &WorkerHello { regions: regions(1024), ..ours }).unwrap_err();
    assert!(reason.contains("8192 bytes in 2 shards"), "compared by its stated facts: {reason}");
}
