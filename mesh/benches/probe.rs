//! The directory of 48 peers with 500,000 keys each: the cost of a probe of 640 keys, its errors, and the
//! bytes per key.
//!
//! One core. Before every probe 64 MiB are swept, so the filters come from memory, as in a sidecar with other
//! work between two queries. The last line is JSON.

#![expect(clippy::print_stdout, reason = "a bench reports")]
#![expect(clippy::disallowed_methods, reason = "a bench reads the clock")]

use std::hint::black_box;
use std::time::Instant;

use mesh::digest::{Change, Digest};
use mesh::directory::{Config, Directory, Filter};
use mesh::transport::PeerNumber;
use shm_protocol::key::{BlockHash, NamespaceDigest};

const PEERS: u32 = 48;
const KEYS: u64 = 500_000;
const QUERY: u64 = 640;
const PROBES: u64 = 400;
/// First numbers of keys at no peer, and of keys at every peer.
const ABSENT: u64 = 1 << 40;
const SHARED: u64 = 1 << 41;

fn hash(number: u64) -> BlockHash {
    BlockHash::from_words([number, !number, number, number])
}

fn digest(number: u64) -> Digest {
    Digest::new(&NamespaceDigest([7; 16]), 0, &hash(number))
}

fn digests(from: u64, count: u64) -> Vec<Digest> {
    (from..from + count).map(digest).collect()
}

/// A peer's own keys and the shared ones, with a follower's spare room, and the time per key.
fn filter(peer: u64) -> (Filter, f64) {
    let keys: Vec<Digest> = [digests(peer * KEYS, KEYS - QUERY), digests(SHARED, QUERY)].concat();
    let mut filter = Filter::with_capacity(keys.len() + keys.len() / 8 + 16_384);
    let start = Instant::now();
    assert!(keys.iter().all(|key| filter.insert(*key)));
    (filter, start.elapsed().as_nanos() as f64 / keys.len() as f64)
}

/// Microseconds of a probe for queries from these numbers on, and the average number of candidates and keys
/// found.
fn probes(directory: &Directory, swept: &mut [u64], first: impl Fn(u64) -> u64) -> ([f64; 2], f64, f64) {
    let (mut times, mut named, mut found) = (Vec::new(), 0, 0);
    for number in 0..PROBES {
        let keys = digests(first(number), QUERY);
        swept.iter_mut().for_each(|word| *word = word.wrapping_add(number));
        black_box(&swept);
        let start = Instant::now();
        let candidates = directory.probe(0, &keys);
        times.push(start.elapsed().as_nanos() as f64 / 1000.0);
        named += candidates.len();
        found += candidates.first().map_or(0, |candidate| candidate.run);
    }
    times.sort_by(f64::total_cmp);
    let at = |share: f64| times[(times.len() as f64 * share) as usize];
    ([at(0.5), at(0.99)], named as f64 / PROBES as f64, f64::from(found) / PROBES as f64)
}

/// Nanoseconds of a change, applied in deltas of a thousand, to one peer after the other.
fn apply_ns(directory: &mut Directory) -> f64 {
    let deltas: Vec<(PeerNumber, Vec<Change>)> = (0..10 * PEERS)
        .map(|number| {
            let (peer, turn) = (number % PEERS, u64::from(number / PEERS));
            let gone = digests(u64::from(peer) * KEYS + turn * 500, 500);
            let come = digests(ABSENT * 2 + u64::from(number) * 500, 500);
            let changes = gone.into_iter().map(Change::Removed).chain(come.into_iter().map(Change::Added));
            (PeerNumber(peer), changes.collect())
        })
        .collect();
    let start = Instant::now();
    for (peer, changes) in &deltas {
        assert!(directory.apply(*peer, changes));
    }
    start.elapsed().as_nanos() as f64 / (deltas.len() * 1000) as f64
}

fn main() {
    let mut directory = Directory::new(Config::default());
    let (mut insert_ns, mut wrong) = (0.0, 0);
    let strangers = digests(ABSENT, 1_000_000);
    for peer in 0..PEERS {
        let (filter, ns) = filter(peer.into());
        insert_ns += ns / f64::from(PEERS);
        if peer < 10 {
            wrong += strangers.iter().filter(|key| filter.contains(**key)).count();
        }
        directory.join(PeerNumber(peer));
        directory.replace(PeerNumber(peer), filter);
    }
    let wrong = wrong as f64 / (10 * strangers.len()) as f64;
    let memory: usize = directory.peers().map(|peer| peer.bytes).sum();
    let bytes_per_key = memory as f64 / (u64::from(PEERS) * KEYS) as f64;
    let full = Filter::with_capacity(KEYS as usize).bytes() as f64 / KEYS as f64;

    let mut swept = vec![0; 8 << 20];
    // Each query is at another peer, and at another place in it.
    let true_first = |number: u64| number * 13 % u64::from(PEERS) * KEYS + number * 1009 % (KEYS - 2 * QUERY);
    let (one, named_one, run) = probes(&directory, &mut swept, true_first);
    let (none, named_none, _) = probes(&directory, &mut swept, |number| ABSENT + 2_000_000 + number * QUERY);
    let (all, named_all, run_all) = probes(&directory, &mut swept, |_| SHARED);
    assert!(run >= QUERY as f64 && run_all >= QUERY as f64, "inserted keys are found");
    let apply_ns = apply_ns(&mut directory);

    let hashes: Vec<BlockHash> = (0..QUERY).map(hash).collect();
    let start = Instant::now();
    for _ in 0..1000 {
        for hash in &hashes {
            black_box(Digest::new(&NamespaceDigest([7; 16]), 0, black_box(hash)));
        }
    }
    let digest_us = start.elapsed().as_nanos() as f64 / 1e6;

    println!(
        "{PEERS} peers of {KEYS} keys in {:.1} MB; peers named by a probe: {named_one:.2} where one has the keys, {named_none:.2} where none has, {named_all:.2} where all have",
        memory as f64 / 1e6
    );
    println!(
        "{{\"probe_{QUERY}_one_us_p50\":{:.1},\"probe_{QUERY}_one_us_p99\":{:.1},\
         \"probe_{QUERY}_absent_us_p50\":{:.1},\"probe_{QUERY}_absent_us_p99\":{:.1},\
         \"probe_{QUERY}_all_us_p50\":{:.1},\"probe_{QUERY}_all_us_p99\":{:.1},\
         \"digest_{QUERY}_us\":{digest_us:.1},\"insert_ns\":{insert_ns:.0},\"apply_ns\":{apply_ns:.0},\
         \"false_positives_per_million\":{:.0},\"bytes_per_key\":{bytes_per_key:.2},\"bytes_per_key_full\":{full:.2}}}",
        one[0],
        one[1],
        none[0],
        none[1],
        all[0],
        all[1],
        wrong * 1e6,
    );
}
