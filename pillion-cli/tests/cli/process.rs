//! The `pillion` binary as a user meets it.

use std::collections::BTreeMap;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::client::sidecar::{Sidecar, free_port};
use crate::client::{BLOCK_BYTES, Kv, Session, hello, in_time, now, pillion, watch};
use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use serde_json::Value;
use shm_protocol::handshake::{self, Copier, Hello, HelloDigest, Reply, Role, WorkerHello};
use shm_protocol::namespace::{complete_facts, digest_facts, weights_live};
use shm_protocol::request::{SchedulerRequest, WorkerRequest};
use shm_protocol::transport;
use tools::ctl::{self, CtlError};

fn serve(folder: &Path) -> Sidecar {
    Sidecar::start(folder, &[&"--dram", &"16MiB"])
}

fn scheduler(sidecar: &Sidecar) -> Session {
    Session::scheduler(&sidecar.socket, "engine", 1, [1; 16])
}

#[test]
fn sigterm_drains_and_exits_with_zero() {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let folder = tempfile::tempdir().unwrap();
        let sidecar = serve(folder.path());
        let (socket, session) = (sidecar.socket.clone(), scheduler(&sidecar));
        sidecar.signal(signal);
        assert_eq!(sidecar.wait(), Some(0));
        assert!(!socket.exists());
        session.closed();
    }
}

#[test]
fn a_killed_sidecar_s_socket_is_taken_over_a_live_one_s_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let sidecar = serve(folder.path());
    let socket = sidecar.socket.clone();
    let second =
        pillion(&["serve", "--dram", "16MiB", "--http", "127.0.0.1:0", "--socket", socket.to_str().unwrap()]);
    let text = String::from_utf8_lossy(&second.stderr);
    assert!(!second.status.success() && text.contains("another sidecar serves"), "{text}");
    sidecar.kill();
    assert!(socket.exists());
    drop(serve(folder.path()));
}

#[test]
fn the_process_descriptor_says_when_the_sidecar_is_gone() {
    let folder = tempfile::tempdir().unwrap();
    let sidecar = serve(folder.path());
    let session = scheduler(&sidecar);
    assert!(!session.sidecar_gone());
    sidecar.freeze(true);
    assert!(!session.sidecar_gone(), "a frozen one may still write");
    sidecar.signal(Signal::SIGKILL);
    watch("word of its end", || session.sidecar_gone().then_some(()));
    session.closed();
}

#[test]
fn the_admin_pages_name_every_metric() {
    let folder = tempfile::tempdir().unwrap();
    let sidecar = serve(folder.path());
    let _session = scheduler(&sidecar);
    sidecar.wait_line("pillion_sessions 1");
    let page = sidecar.page("/metrics").unwrap();
    for name in [
        "loaded_bytes_total",
        "saved_bytes_total",
        "loaded_blocks_total",
        "saved_blocks_total",
        "query_blocks_total",
        "query_hit_blocks_total",
        "queries_total",
        "blocks",
        "pool_bytes",
        "pool_used_bytes",
        "pool_pinned_bytes",
        "pool_pin_failures_total",
        "parked_ranks",
        "saves_posted_blocks_total",
        "saves_lost_to_reuse_total",
        "saves_dropped_total{reason=\"no_room\"}",
        "saves_dropped_total{reason=\"too_large\"}",
        "saves_dropped_total{reason=\"not_copied\"}",
        "sessions",
        "leases",
        "leases_cut_total",
        "evicted_blocks_total",
        "adopted_blocks_total",
        "adoption_dropped_total",
        "adoption_corrupt_total",
        "adoption_unverified_blocks",
        "pool_unsummed_blocks",
        "files_given_up_total{file=\"pool\",reason=\"version\"}",
        "files_given_up_total{file=\"ssd\",reason=\"sizes\"}",
        "checks_total",
        "checks_differing_total",
        "checks_undecided_total",
        "barred_engines",
        "removed_blocks_total",
        "load_failures_total",
        "load_refusals_total",
        "load_mismatches_total",
        "sessions_closed_total{reason=\"hang_up\"}",
        "connections_refused_total{reason=\"user\"}",
        "connections_refused_total{reason=\"silent\"}",
        "connections_refused_total{reason=\"malformed\"}",
        "connections_refused_total{reason=\"version\"}",
        "connections_refused_total{reason=\"full\"}",
        "connections_refused_total{reason=\"namespace\"}",
        "connections_refused_total{reason=\"contradiction\"}",
        "connections_refused_total{reason=\"memory\"}",
        "connections_refused_total{reason=\"resources\"}",
    ] {
        assert!(page.lines().any(|line| line.starts_with(&format!("pillion_{name} "))), "{name} in\n{page}");
    }
    assert!(sidecar.get("/healthz").unwrap().0.starts_with("HTTP/1.1 200"));
    assert!(sidecar.get("/nothing").unwrap().0.starts_with("HTTP/1.1 404"));
}

#[test]
fn who_is_turned_away_is_counted_by_reason() {
    let folder = tempfile::tempdir().unwrap();
    let sidecar = serve(folder.path());
    let kv = Kv::new();
    let scheduler = hello("engine", 1, Role::Scheduler { run: [1; 16] });
    let expects = Some("0".repeat(32));
    let claims = Role::Worker(WorkerHello { expects, ..kv.stated("tiny", 0, 1, Copier::Engine) });
    let null = std::fs::File::open("/dev/null").unwrap();
    let no_memory = [null.as_fd(); 2];
    let memory = kv.fds.each_ref().map(AsFd::as_fd);
    let refusals: [(&str, Vec<u8>, &[BorrowedFd<'_>]); 5] = [
        ("malformed", b"GET / HTTP/1.1".to_vec(), &[]),
        ("version", handshake::encode_record(&Hello { version: 99, oldest: None, ..scheduler.clone() }), &[]),
        ("namespace", handshake::encode_record(&hello("engine", 1, claims)), &memory),
        (
            "memory",
            handshake::encode_record(&hello("engine", 1, kv.worker(0, 1, Copier::Engine))),
            &no_memory,
        ),
        ("silent", Vec::new(), &[]),
    ];
    let counted =
        |reason: &str| sidecar.shows(&format!("pillion_connections_refused_total{{reason=\"{reason}\"}} 1"));
    for (reason, record, descriptors) in &refusals {
        assert!(!counted(reason), "{reason}");
        let connection = transport::connect_socket(&sidecar.socket, crate::client::WATCHDOG).unwrap();
        if !record.is_empty() {
            transport::send_record(&connection, record, descriptors).unwrap();
        }
        let (reply, _) = transport::receive_record(&connection).unwrap();
        assert!(matches!(handshake::decode_reply(&reply), Ok(Reply::Refused { .. })), "{reason}");
        assert!(counted(reason), "{reason}");
    }
}

#[test]
fn an_engine_s_state_is_shown_while_it_is_connected() {
    let folder = tempfile::tempdir().unwrap();
    let sidecar = serve(folder.path());
    let (kv, run) = (Kv::new(), [6; 16]);
    let mut scheduler = Session::scheduler(&sidecar.socket, "tiny", 1, run);
    sidecar.wait_line("pillion_engine_state{engine=\"tiny\",state=\"idle\"} 1");
    scheduler.open_log(0, &crate::client::keys(1));
    scheduler.query(0, 1, 1);
    sidecar.wait_line("pillion_engine_state{engine=\"tiny\",state=\"unbound\"} 1");
    let hello = hello("tiny", 1, kv.worker(0, 1, Copier::Engine));
    let rank = Session::rank(&sidecar.socket, &hello, &kv, run);
    sidecar.wait_line("pillion_engine_state{engine=\"tiny\",state=\"serving\"} 1");
    sidecar.wait_line("pillion_engine_state{engine=\"tiny\",state=\"unbound\"} 0");
    drop((scheduler, rank));
    watch("nothing of it", || {
        sidecar.page("/metrics").filter(|page| !page.contains("pillion_engine_state{"))
    });
}

#[test]
fn people_see_what_it_does_on_a_page_and_on_a_terminal() {
    let folder = tempfile::tempdir().unwrap();
    let sidecar = serve(folder.path());
    let _session = Session::scheduler(&sidecar.socket, "<i>tiny</i>", 1, [6; 16]);
    sidecar.wait_line("pillion_engine_state{engine=\"<i>tiny</i>\",state=\"idle\"} 1");
    let (head, page) = sidecar.get("/").unwrap();
    assert!(head.starts_with("HTTP/1.1 200") && head.contains("default-src 'none'"), "{head}");
    for part in [": ready</h1>", "<td>memory</td>", "<td>&lt;i&gt;tiny&lt;/i&gt;</td><td>idle</td>"] {
        assert!(page.contains(part), "{part} in\n{page}");
    }
    let top = |address: &str| {
        let command =
            Command::new(env!("CARGO_BIN_EXE_pillion")).args(["top", "--http", address]).output().unwrap();
        (
            command.status.success(),
            String::from_utf8(command.stdout).unwrap() + &String::from_utf8(command.stderr).unwrap(),
        )
    };
    let (shown, text) = top(&sidecar.http());
    assert!(
        shown && text.contains("\nTiers\n") && text.contains("\n<i>tiny</i>              idle "),
        "{text}"
    );
    let (shown, text) = top(&format!("127.0.0.1:{}", free_port()));
    assert!(!shown && text.contains("cannot reach 127.0.0.1:") && text.contains("pass its --http"), "{text}");
    assert_eq!(text.matches("Connection refused").count(), 1, "{text}");
    sidecar.freeze(true);
    let (shown, text) = top(&sidecar.http());
    assert!(!shown && text.contains("did not answer within 3 s") && text.contains("restart it"), "{text}");
}

#[test]
fn a_mistyped_variable_is_warned_of_once() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_pillion"));
    // PILLION_ORDER is an option of another command.
    command.env("PILLION_SOCK", "/a").env("PILLION_ORDER", "at-once").env("PILLION_SERVICE_HOST", "10.0.0.1");
    let _sidecar = Sidecar::start_by(command, folder.path(), &[&"--dram", &"16MiB"]);
    let log = std::fs::read_to_string(folder.path().join("log")).unwrap();
    let warned: Vec<_> = log.lines().filter(|line| line.contains("belongs to no option")).collect();
    assert!(warned.len() == 1 && warned[0].contains("variable PILLION_SOCK"), "{log}");
}

/// On a terminal of `script`. A look at a frozen sidecar lasts for 3 s, and the key comes within them.
#[test]
fn a_key_ends_top_while_the_sidecar_does_not_answer() {
    let folder = tempfile::tempdir().unwrap();
    let sidecar = serve(folder.path());
    let shown = in_time("the key", || {
        let top = format!("{} top --every 100ms --http {}", env!("CARGO_BIN_EXE_pillion"), sidecar.http());
        let (screen, line) = (folder.path().join("screen"), format!("stty rows 40 cols 120; exec {top}"));
        let mut terminal = Command::new("script");
        terminal.args(["--quiet", "--flush", "--command", &line]).arg(&screen);
        let mut terminal = terminal.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let text = || String::from_utf8_lossy(&std::fs::read(&screen).unwrap_or_default()).into_owned();
        watch("the tables", || text().contains("Tiers").then_some(()));
        let began = now();
        sidecar.freeze(true);
        std::thread::sleep(Duration::from_millis(500));
        terminal.stdin.as_mut().unwrap().write_all(b"q").unwrap();
        assert!(terminal.wait().unwrap().success());
        let (in_time, text) = (began.elapsed() < Duration::from_secs(3), text());
        sidecar.freeze(false);
        in_time.then_some(text)
    });
    assert!(!shown.contains("did not answer"), "{shown}");
}

/// A trace of functions names no remedy.
#[test]
fn what_keeps_it_from_starting_is_told_without_a_trace_and_with_status_2() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("p.sock");
    std::fs::write(&socket, "precious").unwrap();
    let socket = socket.to_str().unwrap();
    let file = folder.path().join("none.toml");
    let serve: &[&str] = &["serve", "--socket", socket, "--http", "127.0.0.1:0", "--gpu", "off"];
    for (more, told) in [
        (&[][..], "pass --dram SIZE"),
        (&["--dram", "16MiB", "--lease-ttl", "1s"], "10s to 600s"),
        (&["--dram", "lots"], "lots"),
        (&["--dram", "16MiB", "--config", file.to_str().unwrap()], "cannot read the configuration file"),
        (&["--dram", "16MiB"], "is not a pillion socket"),
        (&["--dram", "16MiB", "--pool-path", "/proc/pool"], "/proc/pool"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pillion"));
        let output = command.args(serve).args(more).env("RUST_BACKTRACE", "1").output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(text.contains(told), "{more:?}: {text}");
        assert!(!text.contains("backtrace") && !text.contains("anyhow"), "{text}");
        assert_eq!(output.status.code(), Some(2), "{text}");
    }
}

/// A sidecar whose process may make files of at most so many MiB.
fn limited(limit_mib: u64, more: &[&str]) -> Command {
    let mut command = Command::new("sh");
    // In units of 512 bytes.
    let script = format!("ulimit -f {} && exec \"$0\" \"$@\"", limit_mib << 11);
    command.args([
        "-c",
        &script,
        env!("CARGO_BIN_EXE_pillion"),
        "serve",
        "--http",
        "127.0.0.1:0",
        "--gpu",
        "off",
    ]);
    command.args(more);
    command
}

#[test]
fn a_limit_of_file_sizes_below_what_it_needs_is_refused_with_the_limit_and_the_need() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("p.sock");
    let disk = format!("{}:128MiB:create", folder.path().join("log").display());
    let (dram, session) = ((72 << 20).to_string(), "52006912 bytes".to_owned());
    for (limit_mib, more, told) in [
        (64, &["--dram", "70MiB"][..], ["the pool of --dram", dram.as_str()]),
        (32, &["--dram", "16MiB"], ["the session of an engine", &session]),
        (64, &["--dram", "16MiB", "--ssd", &disk], ["log:128.0 MiB of --ssd", "134217728 bytes"]),
    ] {
        let output = limited(limit_mib, more).arg("--socket").arg(&socket).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        let limit = format!("files of {} bytes at most (RLIMIT_FSIZE)", limit_mib << 20);
        assert!(told.iter().all(|told| text.contains(told)) && text.contains(&limit), "{text}");
        assert_eq!(output.status.code(), Some(2), "{text}");
    }
}

#[test]
fn a_file_that_gets_too_long_does_not_end_it() {
    let folder = tempfile::tempdir().unwrap();
    let sidecar = serve(folder.path());
    sidecar.signal(Signal::SIGXFSZ);
    let _session = scheduler(&sidecar);
    sidecar.wait_line("pillion_sessions 1");
    sidecar.signal(Signal::SIGTERM);
    assert_eq!(sidecar.wait(), Some(0));
}

#[test]
fn a_data_thread_that_stands_still_is_told_by_probes_and_doctor() {
    let folder = tempfile::tempdir().unwrap();
    let sidecar = serve(folder.path());
    let doctor = || {
        let report = pillion(&["doctor", "--json", "--socket", sidecar.socket.to_str().unwrap()]).stdout;
        let report: Vec<Value> = serde_json::from_slice(&report).unwrap();
        report.into_iter().find(|finding| finding["check"] == "sidecar").unwrap()
    };
    watch("a sound sidecar", || (doctor()["level"] == "ok").then_some(()));
    let answers = |path: &str, status: &str| {
        let head = format!("HTTP/1.1 {status}");
        watch(&format!("{path} with {status}"), || {
            sidecar.get(path).filter(|(said, _)| said.starts_with(&head))
        })
    };
    let thread = stop_data_thread(sidecar.pid());
    let asking = std::thread::spawn({
        let target = sidecar.control();
        move || {
            (
                ctl::send_request(&target, "GET", "/namespaces", ""),
                ctl::send_request(&target, "GET", "/log-level", ""),
            )
        }
    });
    answers("/readyz", "503");
    assert!(sidecar.get("/healthz").unwrap().0.starts_with("HTTP/1.1 200"), "it may come back");
    let found = doctor();
    assert!(
        found["level"] == "fail" && found["text"].as_str().unwrap().contains("does not answer"),
        "{found}"
    );
    let (_, text) = answers("/healthz", "503");
    let seconds = text.split_once("the data thread has made no turn for ").and_then(|(_, rest)| {
        let (seconds, _) = rest.split_once(' ')?;
        seconds.parse::<f64>().ok()
    });
    assert!(seconds.is_some_and(|seconds| seconds >= 10.0), "{text}");
    let (unanswered, level) = asking.join().unwrap();
    assert!(
        matches!(&unanswered, Err(CtlError::Refused { status, .. }) if status.as_u16() == 504),
        "{unanswered:?}"
    );
    assert!(level.unwrap().contains("info"), "requests without the data thread are answered");
    ptrace::detach(thread, None).unwrap();
    answers("/readyz", "200");
    answers("/healthz", "200");
}

#[test]
fn a_data_thread_that_stands_still_does_not_keep_the_process() {
    let folder = tempfile::tempdir().unwrap();
    let sidecar = serve(folder.path());
    let thread = stop_data_thread(sidecar.pid());
    sidecar.signal(Signal::SIGTERM);
    // The tracing thread must see the stopped thread's end before the process is gone.
    watch("the end of the stopped thread", || {
        let seen = waitpid(thread, Some(WaitPidFlag::__WALL | WaitPidFlag::WNOHANG)).unwrap();
        (seen != WaitStatus::StillAlive).then_some(())
    });
    assert_eq!(sidecar.wait(), Some(1));
}

/// Stops the data thread until it is detached, or its process ends.
fn stop_data_thread(process: Pid) -> Pid {
    let thread = data_thread(process);
    ptrace::seize(thread, ptrace::Options::empty()).unwrap();
    ptrace::interrupt(thread).unwrap();
    waitpid(thread, Some(WaitPidFlag::__WALL)).unwrap();
    thread
}

fn data_thread(process: Pid) -> Pid {
    let named = |path: &std::path::PathBuf| {
        std::fs::read_to_string(path.join("comm")).is_ok_and(|name| name == "pillion-data\n")
    };
    // The sidecar is ready, and the thread gives itself its name a moment later.
    let found = watch("the data thread", || {
        let tasks = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
        tasks.map(|task| task.unwrap().path()).find(named)
    });
    Pid::from_raw(found.file_name().unwrap().to_str().unwrap().parse().unwrap())
}

#[test]
fn options_come_from_the_environment_below_the_command_line() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, port) = (folder.path().join("p.sock"), free_port());
    let mut command = Command::new(env!("CARGO_BIN_EXE_pillion"));
    command
        .args(["serve", "--dram", "16Mi"])
        .env("PILLION_DRAM", "lots and lots")
        .env("PILLION_SOCKET", &socket)
        .env("PILLION_HTTP", format!("127.0.0.1:{port}"))
        .env("PILLION_LOG_FORMAT", "json");
    let sidecar = Sidecar::spawn(command, folder.path(), port);
    assert!(socket.exists());
    sidecar.terminate();
    let log = std::fs::read_to_string(folder.path().join("log")).unwrap();
    for line in log.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        assert!(line["level"].is_string() && line["message"].is_string(), "{line}");
    }
    assert!(log.contains("\"serving\""), "{log}");
}

#[test]
fn the_list_of_namespaces_shows_facts_and_who_states_them() {
    let folder = tempfile::tempdir().unwrap();
    let sidecar = serve(folder.path());
    let shown = || sidecar.ask("GET", "/namespaces", &Value::Null).unwrap()["namespaces"].take();
    assert_eq!(shown(), serde_json::json!([]));
    let kv = Kv::new();
    let role = kv.worker(0, 1, Copier::Engine);
    let session = Session::open(&sidecar.socket, &hello("engine", 1, role), &kv.fds.each_ref());
    let namespace = &session.welcome.namespace;
    assert_eq!(
        shown(),
        serde_json::json!([{
            "namespace": namespace, "facts": {"model": "tiny"}, "engines": 1, "block_bytes": BLOCK_BYTES, "memory_blocks": 0,
        }])
    );
    drop(session);
    watch("its end", || Some(shown()).filter(|entries| entries[0]["engines"] == 0));
}

/// Two ranks whose weights make the namespace together: it is unknown until both have joined.
#[test]
fn an_engine_is_shown_what_its_ranks_bind_it_to() {
    let folder = tempfile::tempdir().unwrap();
    let sidecar = serve(folder.path());
    let (socket, control) = (&sidecar.socket, sidecar.control());
    let (kvs, run) = ([Kv::new(), Kv::new()], [6; 16]);
    let mut scheduler = Session::scheduler(socket, "engine", 2, run);
    let open = |rank: usize, live: u8| {
        let worker = kvs[rank].stated("tiny", rank as u32, 2, Copier::Engine);
        let role = Role::Worker(WorkerHello { live_weights: Some(HelloDigest([live; 16])), ..worker });
        Session::open(socket, &hello("engine", 2, role), &kvs[rank].fds.each_ref())
    };
    let mut ranks = [open(0, 0), open(1, 1)];
    assert_eq!(ranks[1].welcome.namespace, "", "the other rank has a part in it");
    let known = || ctl::send_request(&control, "GET", "/namespaces", "").unwrap();
    assert!(known().contains("\"namespaces\": []"), "{}", known());
    ranks.iter_mut().for_each(|rank| rank.post(WorkerRequest::Join { run, step: 0 }));
    let bound = |session: &Session, weights| {
        watch("words of that number", || {
            Some(session.memory.load_bound()).filter(|it| it.weights == weights && it.namespace != 0)
        })
    };
    let word = |lives: [u8; 2]| {
        let live = weights_live(lives.map(|live| Some([live; 16])));
        let stated = BTreeMap::from([("model".to_owned(), "tiny".to_owned())]);
        (live, digest_facts(&complete_facts(&stated, live)).words()[0])
    };
    let first = bound(&scheduler, 0);
    assert_eq!((first.live, first.namespace), word([0, 1]));
    assert_eq!(bound(&ranks[0], 0), first);
    assert!(known().contains("weights_live"), "{}", known());
    scheduler.post(SchedulerRequest::Weights { number: 1 });
    for (rank, session) in ranks.iter_mut().enumerate() {
        session.post(WorkerRequest::Weights { number: 1, answers: 1, live: [8 + rank as u8; 16] });
    }
    let second = bound(&scheduler, 1);
    assert_eq!((second.live, second.namespace), word([8, 9]));
    assert_eq!(bound(&ranks[1], 1), second);
    // One rank finds other weights by itself.
    ranks[0].post(WorkerRequest::Weights { number: 2, answers: 1, live: [7; 16] });
    scheduler.closed();
    let mut again = Session::scheduler(socket, "engine", 2, run);
    again.post(SchedulerRequest::Weights { number: 1 });
    // The ranks have answered the scheduler's former session.
    ranks.iter().for_each(Session::closed);
    for (rank, live) in [7, 9].into_iter().enumerate() {
        ranks[rank] = open(rank, live);
        ranks[rank].post(WorkerRequest::Weights { number: 1, answers: 1, live: [live; 16] });
        ranks[rank].post(WorkerRequest::Join { run, step: 0 });
    }
    let third = bound(&again, 1);
    assert_eq!((third.live, third.namespace), word([7, 9]));
}

#[test]
fn the_doctor_s_exit_status_is_its_verdict() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let one = file("a.json", r#"{"facts": {"model": "tiny", "none_hash": "aa"}}"#);
    let other = file("b.json", r#"{"facts": {"model": "tiny", "none_hash": "bb"}}"#);
    let broken = file("c.json", "[]");
    let cases: [(&[&str], i32, &str); 5] = [
        (&[&one, &one], 0, "both are"),
        (&[&one, &other], 1, "set PYTHONHASHSEED to the same value on both"),
        (&[&one, &broken], 2, "pillion ctl namespaces NAMESPACE"),
        (&[&one, "/nonexistent"], 2, "cannot read /nonexistent"),
        (&[&one], 2, "B.json"),
    ];
    for (arguments, status, text) in cases {
        let output = pillion(&[&["doctor"], arguments].concat());
        let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{arguments:?}: {said}");
        assert!(said.contains(text), "{arguments:?}: {said}");
    }
    let output = pillion(&["doctor", "--json", &one, &other]);
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&found[0]["check"], &found[0]["level"]), (&"none_hash".into(), &"fail".into()));
    let sidecar = serve(folder.path());
    watch("a sound sidecar", || {
        let output = pillion(&["doctor", "--socket", sidecar.socket.to_str().unwrap()]);
        let said = String::from_utf8_lossy(&output.stdout);
        said.contains("ok    sidecar: a sidecar of release").then_some(())
    });
}

#[test]
fn errors_name_the_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("c.toml");
    std::fs::write(&file, "dram = \"1GiB\"\nsockett = \"x\"\n").unwrap();
    let socket = folder.path().join("s");
    let socket = socket.to_str().unwrap();
    let cases: [(&[&str], &str); 7] = [
        (&["serve", "--dram", "16MiB", "--gpu", "0", "--socket", socket], "auto, off"),
        (&["serve", "--socket", socket], "--dram"),
        (&["serve", "--config", file.to_str().unwrap()], "pool-path"),
        (&["serve", "--dram", "30", "--socket", socket], "30GiB"),
        (&["serve", "--dram", "1TiB", "--http", "127.0.0.1:0", "--socket", socket], "lower --dram"),
        (
            &["serve", "--dram", "1TiB", "--hugepages", "--http", "127.0.0.1:0", "--socket", socket],
            "sysctl vm.nr_hugepages=",
        ),
        (&["serve", "--dram", "16MiB", "--quota", "x=1GiB", "--socket", socket], "others=5GiB"),
    ];
    for (arguments, remedy) in cases {
        let output = pillion(arguments);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(remedy), "{arguments:?}: {text}");
    }
    let protocol = format!("protocol {}", shm_protocol::PROTOCOL_VERSION);
    assert!(String::from_utf8_lossy(&pillion(&["version"]).stdout).contains(&protocol));
}

#[test]
fn probes_are_answered_beside_connections_that_ask_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let sidecar = serve(folder.path());
    let idle: Vec<_> = (0..300)
        .map(|_| std::net::TcpStream::connect(sidecar.http().trim_start_matches("http://")).unwrap())
        .collect();
    for page in ["/healthz", "/readyz", "/metrics"].repeat(3) {
        let answer = in_time("a page", || sidecar.get(page).map(|(head, _)| head));
        assert!(answer.starts_with("HTTP/1.1 200"), "{page}: {answer}");
    }
    drop(idle);
}
