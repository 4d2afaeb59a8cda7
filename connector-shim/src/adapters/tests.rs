//! The keys of an adapter's blocks, with real files.

use std::fs::{self, FileTimes, OpenOptions};
use std::path::Path;
use std::time::{Duration, SystemTime};

use tempfile::TempDir;

use super::*;
use crate::peer::eventually;

const RUN: [u8; 16] = [0; 16];
const OTHER_RUN: [u8; 16] = [1; 16];
const FORM: &str = "lora_dtype=torch.bfloat16";
const NO_CACHE: Adapter = Adapter::Unknown;

/// The adapters of one engine, and the number of times that ranks held other bytes than before.
struct Engine {
    adapters: EngineAdapters,
    replaced: u32,
    said: Vec<String>,
}

impl Engine {
    fn new(run: [u8; 16], form: &str) -> Self {
        Self { adapters: EngineAdapters::new(run, form.into()), replaced: 0, said: Vec::new() }
    }

    fn look_at(&mut self, request: &AdapterRequest) {
        self.replaced += u32::from(self.adapters.look_at(request));
    }

    fn loads(&mut self, request: &AdapterRequest) {
        self.replaced += u32::from(self.adapters.loads(request));
    }

    fn forget(&mut self, number: u64) {
        self.replaced += u32::from(self.adapters.forget(number));
    }

    /// The fold of an arriving request, once its digest is ready.
    fn fold(&mut self, request: &AdapterRequest) -> Adapter {
        self.look_at(request);
        eventually("digest of an adapter", || self.adapters.fold(request) != Adapter::Undigested);
        let found = self.adapters.fold(request);
        self.said.extend(self.adapters.take_notices());
        found
    }
}

fn engine() -> Engine {
    Engine::new(RUN, FORM)
}

/// Writes the files of an adapter.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), b"one", r#"{"r": 8}"#);
    folder
}

/// Writes the adapter's files, with a new time: two writes at one time would look the same.
fn write(folder: &Path, weights: &[u8], config: &str) {
    for (name, content) in
        [("adapter_config.json", config.as_bytes()), ("adapter_model.safetensors", weights)]
    {
        let path = folder.join(name);
        let before = fs::metadata(&path).and_then(|stat| stat.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
        fs::write(&path, content).unwrap();
        let times = FileTimes::new().set_modified(before + Duration::from_secs(1));
        OpenOptions::new().write(true).open(&path).unwrap().set_times(times).unwrap();
    }
}

fn write_weights(folder: &TempDir, weights: &[u8]) {
    write(folder.path(), weights, r#"{"r": 8}"#);
}

fn asks(folder: &Path) -> AdapterRequest {
    AdapterRequest {
        number: 1,
        name: "name".into(),
        path: folder.to_owned(),
        in_place: false,
        elsewhere: false,
        fused_experts: false,
    }
}

fn in_place(folder: &Path) -> AdapterRequest {
    AdapterRequest { in_place: true, ..asks(folder) }
}

// --- from files ---

/// The folds are equal on every engine, under any path, number and name.
#[test]
fn equal_files_make_equal_folds() {
    let (one, copy) = (folder(), folder());
    // Ranks read none of the two files.
    fs::write(copy.path().join("README.md"), "about").unwrap();
    fs::write(copy.path().join("optimizer.pt"), "state").unwrap();
    let first = engine().fold(&asks(one.path()));
    assert!(matches!(first, Adapter::Fold(_)));
    let other = AdapterRequest { number: 7, name: "other".into(), ..asks(copy.path()) };
    assert_eq!(Engine::new(OTHER_RUN, FORM).fold(&other), first);
}

/// Tested are a byte of the weights, the adapter's configuration, and the facts of its application.
#[test]
fn any_difference_makes_another_fold() {
    let one = folder();
    let mut folds = vec![
        engine().fold(&asks(one.path())),
        Engine::new(RUN, "lora_dtype=torch.float16").fold(&asks(one.path())),
        engine().fold(&AdapterRequest { fused_experts: true, ..asks(one.path()) }),
    ];
    for (weights, config) in
        [(b"two" as &[u8], r#"{"r": 8}"#), (b"one", r#"{"r": 4}"#), (b"one ", r#"{"r": 8}"#)]
    {
        let other = folder();
        write(other.path(), weights, config);
        folds.push(engine().fold(&asks(other.path())));
    }
    for (index, fold) in folds.iter().enumerate() {
        assert!(matches!(fold, Adapter::Fold(_)) && !folds[..index].contains(fold), "{index}");
    }
}

/// Earlier releases made the same fold, so their blocks are found.
#[test]
fn a_fold_is_that_of_earlier_releases() {
    let found = engine().fold(&asks(folder().path()));
    let hex = |fold: [u8; 16]| fold.map(|byte| format!("{byte:02x}")).concat();
    let Adapter::Fold(fold) = found else { panic!("{found:?}") };
    assert_eq!(hex(fold), "66413a420ca5384d43829f7377b57529");
}

/// Unchanged files are not read again.
#[test]
fn a_digest_is_computed_once() {
    let (one, mut engine) = (folder(), engine());
    let first = engine.fold(&asks(one.path()));
    assert_eq!((engine.fold(&asks(one.path())), engine.replaced), (first, 0));
    assert_eq!(lock(&engine.adapters.state).works, 1);
}

/// Until the digest is ready the fold is not known.
#[test]
fn nobody_waits_for_a_digest() {
    let (one, mut engine) = (folder(), engine());
    // No request computes.
    engine.adapters.thread = Some(mpsc::channel().0);
    engine.look_at(&asks(one.path()));
    assert_eq!(engine.adapters.fold(&asks(one.path())), Adapter::Undigested);
    write_weights(&one, b"two");
    engine.look_at(&asks(one.path()));
    assert_eq!(engine.adapters.fold(&asks(one.path())), NO_CACHE, "ranks may have loaded either");
}

// --- files changing under the engine ---

/// Ranks may hold the old bytes, or load the new ones at any time.
#[test]
fn changed_files_go_without_the_cache() {
    let (one, mut first_engine) = (folder(), engine());
    let first = first_engine.fold(&asks(one.path()));
    write_weights(&one, b"two");
    assert_eq!(first_engine.fold(&asks(one.path())), NO_CACHE);
    write_weights(&one, b"one");
    assert_eq!(first_engine.fold(&asks(one.path())), NO_CACHE, "what happened in between is not known");
    assert_eq!(engine().fold(&asks(one.path())), first, "the next engine reads what is there");
    let told = first_engine
        .said
        .iter()
        .filter(|text| text.contains("have changed since this engine first saw them"));
    assert_eq!(told.count(), 1);
}

/// The adapter's requests go without the cache, as for any changed adapter.
#[test]
fn an_overwritten_file_of_the_same_size_and_time() {
    let (one, mut engine) = (folder(), engine());
    engine.fold(&asks(one.path()));
    let path = one.path().join("adapter_model.safetensors");
    let before = fs::metadata(&path).unwrap();
    fs::write(&path, b"two").unwrap();
    let times = FileTimes::new().set_modified(before.modified().unwrap());
    OpenOptions::new().write(true).open(&path).unwrap().set_times(times).unwrap();
    let after = fs::metadata(&path).unwrap();
    assert_eq!((after.len(), after.modified().unwrap()), (before.len(), before.modified().unwrap()));
    assert_eq!(engine.fold(&asks(one.path())), NO_CACHE);
}

/// Ranks hold these bytes in both cases.
#[test]
fn files_written_again_with_the_same_bytes_are_the_same() {
    let (one, mut engine) = (folder(), engine());
    let first = engine.fold(&asks(one.path()));
    write_weights(&one, b"one");
    assert_eq!(engine.fold(&asks(one.path())), first);
}

/// Such a digest would be the digest of no version.
#[test]
fn files_that_change_while_they_are_read() {
    let one = folder();
    let before = files_of(one.path());
    write_weights(&one, b"two");
    assert_eq!(digest_files(one.path(), &before), None);
    let mut engine = engine();
    engine.adapters.thread = Some(mpsc::channel().0);
    engine.look_at(&asks(one.path()));
    let work = DigestWork { adapter: 1, number: 1, path: one.path().to_owned(), files: before, before: None };
    lock(&engine.adapters.state).end_digest(&work, None);
    assert_eq!(engine.adapters.fold(&asks(one.path())), NO_CACHE);
}

/// Ranks know an adapter by its number, and serve the held one.
#[test]
fn one_number_for_two_adapters() {
    let (one, other) = (folder(), folder());
    write_weights(&other, b"two");
    let mut first = engine();
    first.fold(&asks(one.path()));
    assert_eq!(first.fold(&asks(other.path())), NO_CACHE);
    assert_eq!(first.fold(&asks(one.path())), NO_CACHE);
    let second = AdapterRequest { number: 2, ..asks(other.path()) };
    assert_eq!(first.fold(&second), engine().fold(&asks(other.path())));
    let mut second = engine();
    second.fold(&in_place(one.path()));
    second.fold(&in_place(other.path()));
    assert_eq!(second.adapters.fold(&in_place(one.path())), NO_CACHE, "of a request that runs");
}

// --- loads by the engine ---

/// Every rank reads the files in this load: they count from then on, and KV computed before is not kept.
#[test]
fn loaded_in_place() {
    let (one, mut first_engine) = (folder(), engine());
    let first = first_engine.fold(&asks(one.path()));
    write_weights(&one, b"two");
    first_engine.loads(&in_place(one.path()));
    assert_eq!(first_engine.replaced, 1);
    let second = first_engine.fold(&asks(one.path()));
    assert!(second != first && second != NO_CACHE && second == engine().fold(&asks(one.path())));
}

/// Ranks keep an adapter that they hold.
#[test]
fn loaded_again_but_not_in_place() {
    let (one, mut engine) = (folder(), engine());
    let first = engine.fold(&asks(one.path()));
    engine.loads(&asks(one.path()));
    assert_eq!((engine.fold(&asks(one.path())), engine.replaced), (first, 0));
    write_weights(&one, b"two");
    engine.loads(&asks(one.path()));
    assert_eq!(engine.fold(&asks(one.path())), NO_CACHE);
}

/// Ranks then hold the present files.
#[test]
fn removed_and_loaded_again() {
    let (one, mut engine) = (folder(), engine());
    let first = engine.fold(&asks(one.path()));
    engine.forget(1);
    assert_eq!(engine.replaced, 1);
    assert_eq!(engine.fold(&asks(one.path())), first);
    engine.forget(2);
    assert_eq!(engine.replaced, 1, "nobody named it");
}

/// Ranks read the files in every step: this run has a separate fold, and a new one whenever the files have
/// changed.
#[test]
fn requests_that_load_in_place() {
    let (one, mut first_engine) = (folder(), engine());
    let ask = in_place(one.path());
    let first = first_engine.fold(&ask);
    assert!(first == first_engine.fold(&ask) && first != engine().fold(&asks(one.path())));
    write_weights(&one, b"two");
    let second = first_engine.fold(&ask);
    assert!(second != first && second != NO_CACHE && first_engine.replaced == 1);
    write_weights(&one, b"one");
    let third = first_engine.fold(&ask);
    assert!(third != first && third != second, "not even then");
    assert_ne!(third, Engine::new(OTHER_RUN, FORM).fold(&ask));
    assert!(first_engine.said.len() == 1 && first_engine.said[0].contains("only by this run of this engine"));
}

// --- files out of sight ---

/// The fold also changes whenever ranks may hold other bytes.
#[test]
fn an_unreadable_adapter_is_of_this_run() {
    let empty = tempfile::tempdir().unwrap();
    for path in [Path::new("owner/of-a-hub"), Path::new("/nowhere"), empty.path()] {
        let (ask, mut engine) = (asks(path), engine());
        let first = engine.fold(&ask);
        assert!(first == engine.fold(&ask) && matches!(first, Adapter::Fold(_)));
        assert_ne!(first, Engine::new(OTHER_RUN, FORM).fold(&ask));
        engine.adapters.may_differ();
        assert_ne!(engine.fold(&ask), first);
        assert_eq!(engine.said.len(), 1, "once");
    }
}
