//! Keys for a LoRA adapter's blocks, from the adapter's bytes. An engine's own hashes name an adapter and its path alone.
//!
//! Every adapter has a fold, 16 bytes mixed into each key of a request. The fold follows from the adapter's files, so it is the same on
//! every engine with these files, and from this run alone where the files do not show the ranks' bytes.

mod files;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sha2::{Digest, Sha256};

use self::files::{AdapterFile, digest_files, files_of};
use crate::core::policy::Adapter;

/// A request's adapter, as the engine names it.
#[derive(Clone, Debug)]
pub struct AdapterRequest {
    /// The adapter's number in the ranks.
    pub number: u64,
    /// The user's name for it.
    pub name: String,
    /// The folder of its files.
    pub path: PathBuf,
    /// True if ranks read its files in every step of such a request, although they hold it.
    pub in_place: bool,
    /// True if the adapter's bytes are not in the named files.
    pub elsewhere: bool,
    /// True if the adapter's tensors hold all experts as one.
    pub fused_experts: bool,
}

/// An adapter as first seen, at a request or at a load by the engine itself.
#[derive(Debug)]
struct KnownAdapter {
    name: String,
    path: PathBuf,
    /// The files; empty if this process cannot see them, for example if ranks fetch them from a hub.
    files: Vec<AdapterFile>,
    /// A number that no other known adapter has or had: a fold made from it is new.
    serial: u64,
    /// The number of its last digest; 0: none was begun.
    work: u64,
    digest: Option<[u8; 32]>,
    /// True after the files have changed under a loaded adapter: ranks load an adapter once, at any time, so
    /// their bytes are unknown.
    uncertain: bool,
}

#[derive(Debug, Default)]
struct AdapterTable {
    known: HashMap<u64, KnownAdapter>,
    serials: u64,
    works: u64,
    said: HashSet<String>,
    notices: Vec<String>,
}

/// A digest to compute.
#[derive(Debug)]
struct DigestWork {
    adapter: u64,
    number: u64,
    path: PathBuf,
    files: Vec<AdapterFile>,
    /// The digest of the bytes that ranks may hold: a different result makes the adapter uncertain.
    before: Option<[u8; 32]>,
}

/// The adapters named by an engine's requests, by their number in the ranks.
#[derive(Debug)]
pub struct EngineAdapters {
    run: [u8; 16],
    /// Further facts on how adapters are applied.
    form: String,
    state: Arc<Mutex<AdapterTable>>,
    /// The sender to the digests' thread, which starts with the first digest.
    thread: Option<Sender<DigestWork>>,
}

// === impl EngineAdapters ===

impl EngineAdapters {
    /// The adapters of one run of an engine; `form`: further facts on how they are applied.
    pub fn new(run: [u8; 16], form: String) -> Self {
        Self { run, form, state: Arc::default(), thread: None }
    }

    /// Looks at an adapter's files before a request makes ranks load it, unless they hold it. Returns true if
    /// ranks now hold other bytes than before.
    pub fn look_at(&mut self, request: &AdapterRequest) -> bool {
        let files = if request.elsewhere { Vec::new() } else { files_of(&request.path) };
        let mut guard = lock(&self.state);
        let state = &mut *guard;
        let (mut replaced, mut work) = (false, None);
        match state.known.get_mut(&request.number) {
            None => state.learn(request, files),
            Some(known) if known.path == request.path && known.files == files => {}
            Some(_) if request.in_place => {
                state.learn(request, files);
                replaced = true;
            }
            Some(known) if known.path != request.path || known.digest.is_none() => {
                state.doubt(request.number)
            }
            Some(known) => {
                known.files = files;
                work = known.digest;
            }
        }
        let known = &state.known[&request.number];
        let first = known.work == 0 && !known.files.is_empty() && !request.in_place;
        let work = (work.is_some() || first).then(|| state.begin_digest(request.number, work));
        drop(guard);
        if let Some(work) = work {
            self.compute(work);
        }
        replaced
    }

    /// Looks at an adapter's files before the engine makes every rank load it. Returns true if ranks then
    /// hold other bytes than before.
    pub fn loads(&mut self, request: &AdapterRequest) -> bool {
        let forgotten = request.in_place && self.forget(request.number);
        self.look_at(request) || forgotten
    }

    /// Forgets the adapter of this number: ranks no longer hold it. Returns true if they held it.
    pub fn forget(&mut self, number: u64) -> bool {
        lock(&self.state).known.remove(&number).is_some()
    }

    /// Renews every fold that is not made of files: ranks may hold other bytes than before.
    pub fn may_differ(&mut self) {
        let mut state = lock(&self.state);
        let AdapterTable { known, serials, .. } = &mut *state;
        for adapter in known.values_mut() {
            *serials += 1;
            adapter.serial = *serials;
        }
    }

    /// Returns the adapter's present fold, or the reason for which there is none.
    pub fn fold(&mut self, request: &AdapterRequest) -> Adapter {
        if !lock(&self.state).known.contains_key(&request.number) {
            self.look_at(request);
        }
        let mut guard = lock(&self.state);
        let state = &mut *guard;
        let known = &state.known[&request.number];
        if known.path != request.path {
            return Adapter::Unknown;
        }
        let why = if request.in_place {
            Some(("load_inplace makes ranks read it again in every step".to_owned(), "load it without that"))
        } else if known.uncertain {
            return Adapter::Unknown;
        } else if known.files.is_empty() {
            let why = format!("its files cannot be read at {}", known.path.display());
            Some((why, "pass a folder that holds them"))
        } else {
            None
        };
        if let Some((why, remedy)) = why {
            let (name, serial) = (&known.name, known.serial.to_string());
            let text = format!(
                "blocks of adapter {name} are found only by this run of this engine: {why}. To share them, {remedy}"
            );
            state.say(text);
            return Adapter::Fold(fold(&[b"run", &self.run, serial.as_bytes()]));
        }
        let Some(digest) = &known.digest else { return Adapter::Undigested };
        let fused = [u8::from(request.fused_experts)];
        Adapter::Fold(fold(&[b"files", digest, &fused, self.form.as_bytes()]))
    }

    /// Messages for the log, each handed over once.
    pub fn take_notices(&mut self) -> Vec<String> {
        std::mem::take(&mut lock(&self.state).notices)
    }

    /// Computes digests one after the other, on a thread of their own. If no thread could start, no digest is
    /// ever ready.
    fn compute(&mut self, work: DigestWork) {
        let thread = self.thread.get_or_insert_with(|| {
            let (sender, works) = mpsc::channel::<DigestWork>();
            let state = Arc::clone(&self.state);
            let begun = std::thread::Builder::new().name("pillion-adapters".into()).spawn(move || {
                for work in works {
                    let digest = digest_files(&work.path, &work.files);
                    lock(&state).end_digest(&work, digest);
                }
            });
            drop(begun);
            sender
        });
        // The receiver is gone if no thread could be started.
        let _ = thread.send(work);
    }
}

fn lock(state: &Mutex<AdapterTable>) -> MutexGuard<'_, AdapterTable> {
    // Nothing under this lock can panic half-way.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn fold(parts: &[&[u8]]) -> [u8; 16] {
    let mut digest = Sha256::new_with_prefix(b"pillion adapter");
    for part in parts {
        digest.update((part.len() as u64).to_le_bytes());
        digest.update(part);
    }
    *digest.finalize().first_chunk().expect("a digest has 32 bytes")
}

// === impl AdapterTable ===

impl AdapterTable {
    fn learn(&mut self, request: &AdapterRequest, files: Vec<AdapterFile>) {
        self.serials += 1;
        let known = KnownAdapter {
            name: request.name.clone(),
            path: request.path.clone(),
            files,
            serial: self.serials,
            work: 0,
            digest: None,
            uncertain: false,
        };
        self.known.insert(request.number, known);
    }

    fn begin_digest(&mut self, adapter: u64, before: Option<[u8; 32]>) -> DigestWork {
        self.works += 1;
        let known = self.known.get_mut(&adapter).expect("the caller has it");
        (known.work, known.digest) = (self.works, None);
        DigestWork {
            adapter,
            number: self.works,
            path: known.path.clone(),
            files: known.files.clone(),
            before,
        }
    }

    fn end_digest(&mut self, work: &DigestWork, digest: Option<[u8; 32]>) {
        let Some(known) = self.known.get_mut(&work.adapter).filter(|known| known.work == work.number) else {
            // A later change of the adapter has begun another digest.
            return;
        };
        if digest.is_none() || work.before.is_some() && work.before != digest {
            self.doubt(work.adapter);
        } else {
            known.digest = digest;
        }
    }

    fn doubt(&mut self, adapter: u64) {
        let known = self.known.get_mut(&adapter).expect("the caller has it");
        known.uncertain = true;
        let text = format!(
            "the files of adapter {} at {} have changed since this engine first saw them, and ranks may hold either version: its \
             requests run without the cache. Load it again with load_inplace, give changed weights a path and a lora_int_id of \
             their own, or restart",
            known.name,
            known.path.display()
        );
        self.say(text);
    }

    fn say(&mut self, text: String) {
        if self.said.insert(text.clone()) {
            self.notices.push(text);
        }
    }
}
