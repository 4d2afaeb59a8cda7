//! Mutual TLS: a node without a certificate of the mesh is not served and not believed, and new files are
//! used without a restart.

mod rig;

use std::io::Write;
use std::path::Path;

use mesh::refusals::Reason;
use mesh::transport::tcp::{Security, Tls};
use mesh::transport::{Fault, PeerNumber, Refusal};
use rig::certificates::{Authority, Folder, NAME};
use rig::{LONG, Node, acquaint, label, patient};

fn node(files: &Folder, name: &str) -> Node {
    Node::new(name, Security::Tls(files.tls()), patient())
}

/// Fetches a block of `other` at `one`.
fn get(one: &mut Node, other: &Node) -> Result<(), Fault> {
    let wanted = label(1, 300_000);
    other.keep(wanted, true);
    acquaint(one, other);
    one.get(1, &[wanted], LONG)[0]
}

/// Writes as many bytes as a file has, and keeps its size and time.
fn rewrite(path: &Path, bytes: &[u8]) {
    let modified = std::fs::metadata(path).unwrap().modified().unwrap();
    let mut file = std::fs::File::options().write(true).open(path).unwrap();
    file.write_all(bytes).unwrap();
    file.set_modified(modified).unwrap();
}

const REFUSED: Result<(), Fault> = Err(Fault::Refused(Refusal::Certificate));

#[test]
fn certificates_of_one_authority_carry_blocks() {
    let ca = Authority::new();
    let files = [Folder::with(&ca, &ca, NAME, 2099), Folder::with(&ca, &ca, NAME, 2099)];
    let (mut one, other) = (node(&files[0], "one"), node(&files[1], "other"));
    assert_eq!(get(&mut one, &other), Ok(()));
    let sizes = [1, 100, 16_384, 65_536, 262_143, 262_145, 500_000];
    let labels: Vec<_> =
        (0..100).map(|number| label(100 + number, sizes[number as usize % sizes.len()])).collect();
    labels.iter().for_each(|label| other.keep(*label, false));
    let (left, right) = (one.fetch(1, &labels, LONG), one.fetch(1, &labels[50..], LONG));
    assert!(one.ends(&left).iter().chain(&one.ends(&right)).all(Result::is_ok));
    one.check_ends();
    other.check_releases();
}

#[test]
fn who_is_not_of_the_mesh_is_not_served() {
    let (ca, strange) = (Authority::new(), Authority::new());
    let good = Folder::with(&ca, &ca, NAME, 2099);
    let other = node(&good, "other");
    let bad = [
        // Trust in another authority, a certificate of another authority, and an expired one.
        Folder::with(&ca, &strange, NAME, 2099),
        Folder::with(&strange, &ca, NAME, 2099),
        Folder::with(&ca, &ca, NAME, 2021),
    ];
    for files in &bad {
        let mut one = node(files, "one");
        assert_eq!(get(&mut one, &other), REFUSED);
        one.wait("a remedy", |seen| seen.notes.iter().any(|note| note.contains("of one CA")).then_some(()));
    }
    other.seen(|seen| assert!(seen.asked.is_empty()));
    other.refused(Reason::Certificate, 3);
    // A node without TLS.
    let mut one = Node::new("one", Security::Plaintext, patient());
    assert!(matches!(get(&mut one, &other), Err(Fault::Malformed(_) | Fault::Peer(_))));
}

#[test]
fn who_is_not_of_the_mesh_is_not_believed() {
    let (ca, strange) = (Authority::new(), Authority::new());
    let good = Folder::with(&ca, &ca, NAME, 2099);
    let bad = [
        Folder::with(&strange, &ca, NAME, 2099),
        Folder::with(&ca, &ca, NAME, 2021),
        Folder::with(&ca, &ca, "another.name", 2099),
    ];
    for files in &bad {
        let (mut one, other) = (node(&good, "one"), node(files, "other"));
        assert_eq!(get(&mut one, &other), REFUSED);
        one.refused(Reason::Certificate, 1);
    }
    // An owner without TLS.
    let (mut one, other) = (node(&good, "one"), Node::new("other", Security::Plaintext, patient()));
    let end = get(&mut one, &other);
    assert!(matches!(end, REFUSED | Err(Fault::Peer(_))), "{end:?}");
}

#[test]
fn new_files_are_used_without_a_restart() {
    let (ca, next) = (Authority::new(), Authority::new());
    let files = [Folder::with(&ca, &ca, NAME, 2099), Folder::with(&ca, &ca, NAME, 2021)];
    let (mut one, other) = (node(&files[0], "one"), node(&files[1], "other"));
    assert_eq!(get(&mut one, &other), REFUSED, "expired");
    files[1].write(&ca, &ca, NAME, 2099);
    assert_eq!(get(&mut one, &other), Ok(()));
    // A missing file changes nothing, and is noted.
    std::fs::remove_file(files[1].0.join("tls.key")).unwrap();
    assert_eq!(get(&mut one, &other), Ok(()));
    let told = |note: &String| note.contains("tls.key") && note.contains("stay in use");
    other.wait("a note", |seen| seen.notes.iter().any(told).then_some(()));
    // The mesh moves to another authority. An unreadable key is read again, although its file looks the same
    // afterwards.
    files[1].write(&next, &next, NAME, 2099);
    let key = files[1].0.join("tls.key");
    let text = std::fs::read(&key).unwrap();
    rewrite(&key, &vec![b' '; text.len()]);
    assert_eq!(get(&mut one, &other), Ok(()), "as before");
    rewrite(&key, &text);
    assert_eq!(get(&mut one, &other), REFUSED);
    files[0].write(&next, &next, NAME, 2099);
    assert_eq!(get(&mut one, &other), Ok(()));
    one.transport().leave(PeerNumber(1));
}

#[test]
fn files_that_cannot_be_used_are_named_with_the_remedy() {
    let ca = Authority::new();
    let files = Folder::with(&ca, &ca, NAME, 2099);
    let another = Folder::with(&ca, &ca, NAME, 2099);
    let garbage = files.0.join("garbage");
    std::fs::write(&garbage, "nothing").unwrap();
    let missing = files.0.join("missing");
    let said = |tls: Tls, file: &Path, what: &str| {
        let config = mesh::transport::tcp::Config::new(rig::node("one"), rig::boot(1), Security::Tls(tls));
        let pool = Node::new("pool", Security::Plaintext, patient());
        let Err(error) = mesh::transport::tcp::Tcp::start(config, pool.blocks.clone(), drop) else {
            panic!("{what}")
        };
        let text = error.to_string();
        assert!(
            text.contains(file.to_str().unwrap()) && text.contains(what) && text.contains("pass"),
            "{text}"
        );
    };
    let good = files.tls();
    said(Tls { certificate: missing.clone(), ..good.clone() }, &missing, "cannot be read");
    said(Tls { certificate: garbage.clone(), ..good.clone() }, &garbage, "holds no certificate");
    said(Tls { key: garbage.clone(), ..good.clone() }, &garbage, "holds no private key");
    said(Tls { key: another.tls().key, ..good.clone() }, &another.tls().key, "does not belong to");
    said(Tls { ca: garbage.clone(), ..good.clone() }, &garbage, "holds no certificate");
    said(Tls { name: "no name".into(), ..good }, Path::new("no name"), "certificate");
}
