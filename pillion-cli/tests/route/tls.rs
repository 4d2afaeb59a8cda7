//! TLS on both sides of the router. A second router is the engine of the first one, as a server of TLS.

use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use std::path::Path;
use std::time::Duration;

use nix::sys::signal::Signal;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};

use super::client::watch;
use super::{Router, answers, computes, prompt};

const HOSTS: [&str; 2] = ["localhost", "127.0.0.1"];

/// Writes a new authority, and its certificate and key for these hosts.
fn issue(folder: &Path, hosts: &[&str]) {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    std::fs::write(folder.join("ca.crt"), params.self_signed(&key).unwrap().pem()).unwrap();
    let (issuer, key) = (Issuer::new(params, key), KeyPair::generate().unwrap());
    let params =
        CertificateParams::new(hosts.iter().map(|host| (*host).to_owned()).collect::<Vec<_>>()).unwrap();
    std::fs::write(folder.join("tls.crt"), params.signed_by(&key, &issuer).unwrap().pem()).unwrap();
    std::fs::write(folder.join("tls.key"), key.serialize_pem()).unwrap();
}

/// The options of a server of TLS with the files of a folder.
fn served(folder: &Path) -> [String; 4] {
    let file = |name| folder.join(name).to_str().unwrap().to_owned();
    ["--tls-cert".into(), file("tls.crt"), "--tls-key".into(), file("tls.key")]
}

#[test]
fn engines_and_clients_speak_tls_and_certificates_are_replaced_while_it_runs() {
    let folder = tempfile::tempdir().unwrap();
    issue(folder.path(), &HOSTS);
    let (prefill, decode) = (computes(), answers());
    let seen = served(folder.path());
    // Files are read again on SIGHUP alone.
    let arguments = [&seen.each_ref().map(String::as_str)[..], &["--refresh-interval", "1000s"]].concat();
    let behind = Router::start(&[&prefill.url()], &[&decode.url()], &arguments);
    // A silent connection is kept for a time, and no other client waits for it.
    let mut silent = TcpStream::connect(("127.0.0.1", behind.port)).unwrap();
    let ca = folder.path().join("ca.crt");
    let arguments = ["--engine-ca", ca.to_str().unwrap(), "--refresh-interval", "1000s"];
    let ask = |host: &str| {
        let url = format!("https://{host}:{}", behind.port);
        let router = Router::start(&[&url], &[&url], &arguments);
        let answer = router.ask(&prompt(20));
        (answer, router)
    };
    for host in ["localhost", "127.0.0.1"] {
        assert_eq!(ask(host).0.body, "{\"answer\":  1}", "{host}");
    }
    assert_eq!(decode.asked().len(), 2);
    // The router has no connection yet, and knows the first authority.
    let url = format!("https://localhost:{}", behind.port);
    let router = Router::start(&[&url], &[&url], &arguments);
    watch("its start", || router.raw("GET", "/health", "").contains("\"decode_up\":1").then_some(()));
    issue(folder.path(), &HOSTS);
    behind.signal(Signal::SIGHUP);
    watch("the new certificate", || (ask("localhost").0.body == "{\"answer\":  1}").then_some(()));
    let told = router.ask(&prompt(20));
    assert!(told.line.contains("502") && told.body.contains("invalid peer certificate"), "{told:?}");
    router.signal(Signal::SIGHUP);
    watch("an answer", || (router.ask(&prompt(20)).body == "{\"answer\":  1}").then_some(()));
    // A key of another certificate changes nothing.
    std::fs::write(folder.path().join("tls.key"), KeyPair::generate().unwrap().serialize_pem()).unwrap();
    behind.signal(Signal::SIGHUP);
    assert_eq!(ask("localhost").0.body, "{\"answer\":  1}");
    silent.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let kind = silent.read(&mut [0]).unwrap_err().kind();
    assert!(matches!(kind, ErrorKind::WouldBlock | ErrorKind::TimedOut), "{kind:?}");
}

#[test]
fn an_engine_with_a_certificate_of_another_host_is_not_asked() {
    let folder = tempfile::tempdir().unwrap();
    issue(folder.path(), &HOSTS[..1]);
    let (prefill, decode) = (computes(), answers());
    let seen = served(folder.path());
    let behind = Router::start(&[&prefill.url()], &[&decode.url()], &seen.each_ref().map(String::as_str));
    let ca = folder.path().join("ca.crt");
    let other = format!("https://127.0.0.1:{}", behind.port);
    let router = Router::start(&[&other], &[&other], &["--engine-ca", ca.to_str().unwrap()]);
    let told = router.ask(&prompt(20));
    assert!(told.line.contains("502") && told.body.contains("not valid for name"), "{told:?}");
    assert!(decode.asked().is_empty());
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_pillion"));
    command.args(["route", "--listen", "127.0.0.1:0", "--prefill", &other, "--decode", &other]);
    let error = String::from_utf8(command.output().unwrap().stderr).unwrap();
    assert!(error.contains(&other) && error.contains("--engine-ca"), "{error}");
}
