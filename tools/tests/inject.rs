//! `pillion inject` on manifests as users write them: tests/inject/NAME.yaml becomes
//! tests/inject/NAME.injected.yaml. `PILLION_WRITE_INJECTED=1` writes the latter again, for a review before
//! the commit.

use std::path::{Path, PathBuf};

use clap::Parser;
use tools::inject::{self, InjectOptions, Output};

#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    options: InjectOptions,
}

const MESH: &[&str] = &["--peer=mesh:9441", "--mesh-secret=pillion-mesh", "--node-id=$(POD_NAME)"];
const CASES: &[(&str, &[&str])] = &[
    ("documented", &[]),
    ("entrypoint", &["--copy=sidecar"]),
    ("module", MESH),
    ("exported", &["--peer=mesh:9441", "--mesh-plaintext"]),
    ("unprivileged", &["--copy=sidecar", "--wheel-installed"]),
    ("batch", &["--", "--quota=others=8GiB"]),
    ("production-stack", &["--mount=nvme:/nvme0", "--memory=36GiB", "--", "--ssd=/nvme0/blocks:500GiB"]),
    ("llm-d", &["--engine-image=registry.example/vllm-pillion:0.3.0"]),
    ("offloading", &["--replace-connector"]),
    ("kserve", &[]),
    ("leader-worker-set", &["--kv-role=kv_producer"]),
];

fn options(more: &[&str]) -> Result<InjectOptions, String> {
    let required: &[&str] = match more.contains(&"--remove") {
        true => &[],
        false => &["--dram=30GiB", "--image=registry.example/pillion:0.3.0"],
    };
    let arguments = Arguments::try_parse_from(["inject"].iter().chain(required).chain(more));
    arguments.map(|arguments| arguments.options).map_err(|error| error.to_string())
}

fn output(source: &str, more: &[&str]) -> Result<Output, String> {
    inject::inject_manifests(source, &options(more)?).map_err(|error| error.to_string())
}

/// The manifests with sidecars, or the error.
fn injected(source: &str, more: &[&str]) -> Result<String, String> {
    let done = output(source, more)?;
    match done.refused {
        0 if done.found => Ok(done.text),
        0 => Err("no engine".to_owned()),
        _ => {
            assert_eq!(done.text, source, "a refused object stays unchanged");
            Err(done.notes.join("\n"))
        }
    }
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/inject")
}

#[test]
fn manifests_become_what_is_kept_beside_them() {
    for (name, more) in CASES {
        let source = std::fs::read_to_string(folder().join(format!("{name}.yaml"))).unwrap();
        let once = injected(&source, more).unwrap_or_else(|error| panic!("{name}: {error}"));
        let kept = folder().join(format!("{name}.injected.yaml"));
        if std::env::var_os("PILLION_WRITE_INJECTED").is_some() {
            std::fs::write(&kept, &once).unwrap();
        }
        assert_eq!(once, std::fs::read_to_string(&kept).unwrap(), "{name}");
    }
}

#[test]
fn a_second_run_changes_what_differs_and_a_removal_gives_back_what_was() {
    for (name, more) in CASES {
        let source = std::fs::read_to_string(folder().join(format!("{name}.yaml"))).unwrap();
        let once = injected(&source, more).unwrap();
        assert_eq!(injected(&once, more).unwrap(), once, "{name}: twice is once");
        let removed = injected(&once, &["--remove"]).unwrap();
        assert!(!removed.contains("pillion"), "{name}: {removed}");
        assert_eq!(injected(&removed, more).unwrap(), once, "{name}: it comes back");
        // Changed in place, the same as from the bare manifest.
        if let Ok(changed) = injected(&once, &["--cpu=7"]) {
            assert_eq!(changed, injected(&source, &["--cpu=7"]).unwrap(), "{name}");
        }
    }
}

/// A Deployment with these lines in its pod.
fn deployment(pod: &str) -> String {
    let pod: String = pod.lines().map(|line| format!("      {line}\n")).collect();
    format!("kind: Deployment\nmetadata:\n  name: a\nspec:\n  template:\n    spec:\n{pod}")
}

fn engine(lines: &str) -> String {
    let lines: String = lines.lines().map(|line| format!("  {line}\n")).collect();
    deployment(&format!("containers:\n- name: e\n  image: vllm/vllm-openai\n{lines}"))
}

fn refusal(source: &str, more: &[&str]) -> String {
    injected(source, more).expect_err("it is refused")
}

#[test]
fn what_cannot_be_done_is_refused_with_a_remedy() {
    let none = "kind: Service\nmetadata:\n  name: a\n";
    for without in [none, "", "kind: List\nitems: []\n"] {
        assert!(!output(without, &[]).unwrap().found);
    }
    assert!(!output(&engine(""), &["--container=other"]).unwrap().found);
    assert!(refusal("a: [", &[]).contains("not valid YAML"));
    let two = deployment(
        "containers:\n- name: a\n  image: vllm/vllm-openai\n- name: b\n  image: b\n  command: [vllm, serve]",
    );
    let error = refusal(&two, &[]);
    assert!(
        error.contains("Deployment a is left unchanged: several")
            && error.contains("(a, b)")
            && error.contains("--container"),
        "{error}"
    );
    assert!(injected(&two, &["--container=b"]).is_ok());
    for foreign in
        ["--kv-transfer-config", "--kv_transfer_config={\"a\":1}", "--kv-transfer-config.kv_connector=X"]
    {
        let error = refusal(&engine(&format!("args: ['{foreign}']")), &[]);
        assert!(error.contains("remove it"), "{error}");
    }
    let network = deployment("hostNetwork: on\ncontainers:\n- name: e\n  image: vllm/vllm-openai");
    assert!(injected(&network, &[]).is_ok());
    let peers = ["--peer=mesh:9441", "--mesh-plaintext"];
    assert!(refusal(&network, &peers).contains("--node-id '$(POD_NAME)'"));
    assert!(refusal(&network, &peers[..1]).contains("--mesh-secret"));
    assert!(refusal(&engine("securityContext:\n  runAsUser: 7"), &[]).contains("runAsGroup"));
    assert!(refusal(&engine("securityContext:\n  runAsNonRoot: true"), &[]).contains("runAsGroup"));
    assert!(refusal(&engine("command: [run.sh]"), &[]).contains("by hand"));
    assert!(refusal(&engine("env: a"), &[]).contains("write one"));
    let path = "env:\n- name: PYTHONPATH\n  valueFrom: {configMapKeyRef: {name: a, key: b}}";
    assert!(refusal(&engine(path), &[]).contains("--engine-image"));
    assert!(injected(&engine(path), &["--wheel-installed"]).is_ok());
    let sidecar =
        deployment("initContainers:\n- name: pillion\ncontainers:\n- name: e\n  image: vllm/vllm-openai");
    assert!(refusal(&sidecar, &[]).contains("remove that container"));
    let several_nodes = "kind: LeaderWorkerSet\nmetadata:\n  name: l\nspec:\n  leaderWorkerTemplate:\n    size: 2\n    \
                         workerTemplate:\n      spec:\n        containers:\n        - name: e\n          image: vllm/vllm-openai\n";
    assert!(refusal(several_nodes, &[]).contains("several nodes"));
    assert!(refusal(&engine(""), &["--mount=nvme:/nvme0"]).contains("volume nvme"));
    for options in [
        &["--mount=nvme"][..],
        &["--", "--sdd=/a:1GiB"],
        &["--", "--socket=/a"],
        &["--remove", "--dram=1GiB"],
    ] {
        assert!(output(&engine(""), options).is_err(), "{options:?}");
    }
    assert!(!output(&engine(""), &["--remove"]).unwrap().found);
}

#[test]
fn what_is_refused_does_not_keep_others_from_their_sidecars() {
    let source = format!("{}---\n{}", engine("command: [run.sh]"), engine("").replace("name: a", "name: b"));
    let done = output(&source, &[]).unwrap();
    assert_eq!((done.refused, done.text.matches("restartPolicy: Always").count()), (1, 1));
    assert!(done.text.starts_with(&engine("command: [run.sh]")));
    let arguments = options(&[]).unwrap();
    let (mut text, mut notes) = (Vec::new(), Vec::new());
    let error =
        inject::inject_stream(source.as_bytes(), &mut text, &mut notes, &arguments).unwrap_err().to_string();
    assert!(error.starts_with("1 of the manifests"), "{error}");
    let notes = String::from_utf8(notes).unwrap();
    assert!(notes.contains("pillion inject: Deployment a is left unchanged: its command is not"), "{notes}");
    let left_out = engine("").replace("name: a\n", "name: a\n  annotations: {pillion/inject: 'false'}\n");
    assert_eq!(output(&left_out, &[]).unwrap().text, left_out);
}

#[test]
fn words_that_look_like_the_program_are_left_alone() {
    let script = "# start the vllm server\necho a vllm server starts\nexec python3 -m vllm.entrypoints.openai.api_server --model a\n";
    let lines: String = script.lines().map(|line| format!("  {line}\n")).collect();
    let text = injected(&engine(&format!("args:\n- |\n{lines}")), &[]).unwrap();
    assert_eq!(text.matches(" --kv-transfer-config.kv_connector=").count(), 2, "{text}");
    assert!(
        text.contains("api_server --kv-transfer-config.kv_connector=PillionConnector")
            && text.contains("# start the vllm server\n"),
        "{text}"
    );
    for script in ["vllm serve a; vllm serve b", "bash -c \"vllm serve a\"", "if x; then vllm serve a; fi"] {
        let text = injected(&engine(&format!("command: [sh, -c, '{script}']")), &[]).unwrap();
        assert_eq!(text.matches("vllm serve --kv-").count(), script.matches("vllm serve").count(), "{text}");
    }
    let waits = "containers:\n- name: c\n  image: curl\n  args: ['echo waiting for the vllm server']\n";
    assert!(!output(&deployment(waits), &[]).unwrap().found);
}

#[test]
fn yaml_is_read_as_kubernetes_reads_it() {
    let shared = deployment(
        "containers:\n- name: e\n  image: vllm/vllm-openai\n  env: &env\n  - {name: A, value: b}\n- name: f\n  image: f\n  env: *env",
    );
    let text = injected(&shared, &[]).unwrap();
    assert_eq!(text.matches("name: PYTHONHASHSEED").count(), 1, "the other container keeps its own: {text}");
    let merged = format!(
        "x: &base {{image: vllm/vllm-openai, args: [--model=a]}}\n{}",
        deployment("containers:\n- name: e\n  <<: *base\n  args: [--model=b]")
    );
    let text = injected(&merged, &[]).unwrap();
    assert!(text.contains("'--model=b'") || text.contains("--model=b"), "{text}");
    assert!(!text.contains("<<"), "{text}");
    assert!(refusal(&engine("args: [a]\nargs: [b]"), &[]).contains("there twice"));
    let other_ends = engine("args: [a]").replace('\n', "\r");
    assert_eq!(injected(&other_ends, &[]).unwrap(), injected(&engine("args: [a]"), &[]).unwrap());
    let bomb = format!(
        "a0: &a0 [x]\n{}{}",
        (1..40).map(|n| format!("a{n}: &a{n} [*a{}, *a{}]\n", n - 1, n - 1)).collect::<String>(),
        engine("")
    );
    assert!(refusal(&bomb, &[]).contains("more than"));
    let texts = engine(
        "env:\n- {name: A, value: 'yes'}\n- {name: B, value: \"1e3\"}\n- {name: C, value: \"a\\tb\\u0007\"}\n- name: D\n  value: |+\n    a\n\n     b\n\n- name: E\n  value: >-\n    a\n    b\n- {name: F, value: !!str 7}",
    );
    let text = injected(&texts, &[]).unwrap();
    for kept in ["'yes'", "'1e3'", "\"a\\tb\\u0007\"", "|+", "'a b'", "!!str 7"] {
        assert!(text.contains(kept), "{kept}: {text}");
    }
}

#[test]
fn another_connector_stays_beside_this_one_or_goes() {
    let other = r#"--kv-transfer-config={"kv_connector":"NixlConnector","kv_role":"kv_producer"}"#;
    let text = injected(&engine(&format!("args: ['{other}']")), &[]).unwrap();
    let order = [r#""MultiConnector""#, r#""NixlConnector""#, r#""PillionConnector""#]
        .map(|name| text.find(name).unwrap());
    let (args, _) = text.split_once("volumeMounts").unwrap();
    assert!(args.contains(r#""kv_role":"kv_producer""#), "{text}");
    assert!(order.iter().all(|place| *place > 0), "{text}");
    let many = r#"--kv-transfer-config={"kv_connector":"MultiConnector","kv_role":"kv_both","kv_connector_extra_config":{"connectors":[{"kv_connector":"NixlConnector","kv_role":"kv_both"}]}}"#;
    let text = injected(&engine(&format!("args: ['{many}']")), &[]).unwrap();
    assert!(text.matches("MultiConnector").count() >= 1 && text.contains("PillionConnector"), "{text}");
    let alone = output(&engine(&format!("args: ['{other}']")), &["--replace-connector"]).unwrap();
    assert!(!alone.text.split("annotations").next().unwrap().contains("MultiConnector"), "{}", alone.text);
    let store = r#"args: ['--kv-transfer-config', '{"kv_connector":"LMCacheConnectorV1"}']"#;
    let done = output(&engine(store), &[]).unwrap();
    assert!(
        done.notes.iter().any(|note| note.contains("kept twice") && note.contains("--replace-connector")),
        "{:?}",
        done.notes
    );
}

#[test]
fn options_beside_which_pillion_stays_out_are_told_of() {
    let noted = |args: &str| output(&engine(&format!("args: [{args}]")), &[]).unwrap().notes.join("\n");
    for option in [
        "--no-enable-prefix-caching",
        "--kv-offloading-size=4",
        "--kv_offloading_size, '4'",
        "--pipeline-parallel-size, '2'",
        "-pp=2",
    ] {
        assert!(
            noted(option).contains("Deployment a: Pillion stays out beside -"),
            "{option}: {}",
            noted(option)
        );
    }
    for option in ["--pipeline-parallel-size=1", "-pp, '1'", "--enable-prefix-caching"] {
        assert!(!noted(option).contains("stays out"), "{option}");
    }
}

const IN_MESH: [&str; 2] = ["--peer=mesh:9441", "--mesh-plaintext"];

/// The sidecar's URL of an engine with these lines, or the note in its place.
fn announced(lines: &str, more: &[&str]) -> Result<String, String> {
    let done = output(&engine(lines), &[&IN_MESH, more].concat()).unwrap();
    let notes = done.notes.iter().filter(|note| note.contains("routers of the mesh")).cloned();
    let urls: Vec<&str> = done.text.split("--engine-url=").skip(1).collect();
    match &urls[..] {
        [] => Err(notes.collect()),
        [url] => {
            assert_eq!(notes.count(), 0);
            Ok(url.split(['\'', '\n']).next().unwrap().to_owned())
        }
        several => panic!("{several:?}"),
    }
}

#[test]
fn routers_of_the_mesh_find_the_engine_by_its_port_and_role() {
    let script = |text: &str| format!("command: [sh, -c, '{text}']");
    let ports = |ports: &[&str]| {
        let port = |port: &&str| format!("- {{containerPort: {port}}}\n");
        format!("ports:\n{}", ports.iter().map(port).collect::<String>())
    };
    for (lines, url) in [
        (String::new(), "8000=both"),
        ("args: [--model=a, --port=8080]".into(), "8080=both"),
        ("args: [serve, a, --port, '8080', --host, 0.0.0.0]".into(), "8080=both"),
        (script("exec vllm serve a --port 8080 --kv-cache-dtype auto"), "8080=both"),
        (script("exec vllm serve a --port \"8080\""), "8080=both"),
        (script("proxy --port 9000 & vllm serve a; sleep --port 7"), "8000=both"),
        (ports(&["8100"]), "8100=both"),
        (ports(&["8000", "5678"]), "8000=both"),
        (format!("args: [--port=8200]\n{}", ports(&["8100"])), "8200=both"),
        (format!("args: [--port=$(PORT)]\n{}", ports(&["8100"])), "8100=both"),
        (format!("args: [--config=a.yaml]\n{}", ports(&["8100, protocol: UDP", "8300"])), "8300=both"),
        ("args: [--config=a.yaml, --port=8400]".into(), "8400=both"),
    ] {
        assert_eq!(announced(&lines, &[]), Ok(format!("http://$(POD_IP):{url}")), "{lines}");
    }
    for (role, name) in [("kv_producer", "prefill"), ("kv_consumer", "decode"), ("kv_both", "both")] {
        let url = Ok(format!("http://$(POD_IP):8000={name}"));
        assert_eq!(announced("", &[&format!("--kv-role={role}")]), url);
        let own = format!(
            r#"args: ['--kv-transfer-config={{"kv_connector":"PillionConnector","kv_role":"{role}"}}']"#
        );
        assert_eq!(announced(&own, &[]), url, "the engine's own");
    }
}

#[test]
fn an_engine_that_routers_cannot_find_is_told_of_with_the_option_to_pass() {
    for (lines, reason) in [
        ("args: [--port=$(PORT)]", "--port has no number"),
        ("args: [--config=a.yaml]", "--port has no number"),
        ("ports: [{containerPort: 8100}, {containerPort: 8200}]", "no single containerPort"),
        ("args: [--uds=/run/vllm.sock]", "a Unix socket"),
        ("args: [--host, 127.0.0.1]", "--host 127.0.0.1"),
        ("args: [--ssl-certfile=/tls.crt, --ssl-keyfile=/tls.key]", "--ssl-certfile"),
        ("args: [--headless]", "--headless"),
        ("command: [sh, -c, 'vllm serve a & vllm serve b']", "several servers"),
        (r#"args: ['--kv-transfer-config={"kv_connector":"PillionConnector"}']"#, "no kv_role"),
    ] {
        let note = announced(lines, &[]).unwrap_err();
        assert!(note.contains(reason) && note.contains("pass -- '--engine-url=http://"), "{lines}: {note}");
        let stated = ["--", "--engine-url=https://engine.example:8000=both"];
        assert_eq!(announced(lines, &stated), Ok("https://engine.example:8000=both".into()), "the owner's");
    }
}

#[test]
fn an_engine_is_announced_only_in_a_mesh() {
    let alone = output(&engine("args: [--uds=/a]"), &[]).unwrap();
    assert!(!alone.text.contains("--engine-url") && !alone.notes.concat().contains("routers"), "{alone:?}");
    let by_etcd = ["--", "--mesh-listen=$(POD_IP):9441", "--etcd=https://etcd:2379", "--mesh-plaintext"];
    let text = injected(&engine(""), &by_etcd).unwrap();
    assert!(
        text.contains("--engine-url=http://$(POD_IP):8000=both") && text.contains("status.podIP"),
        "{text}"
    );
}

#[test]
fn every_kind_of_object_with_containers_is_understood() {
    let rollout = engine("").replace("Deployment", "Rollout");
    assert!(injected(&rollout, &[]).is_ok());
    let custom = "kind: VLLMRuntime\nmetadata:\n  name: a\nspec:\n  image: vllm/vllm-openai\n";
    let done = output(&format!("{custom}---\n{}", engine("")), &[]).unwrap();
    assert!(
        done.notes[0].starts_with("VLLMRuntime a: it runs vLLM and has no containers"),
        "{:?}",
        done.notes
    );
    assert!(done.text.starts_with(custom));
}

#[test]
fn what_is_left_to_add_is_told_of_once() {
    let once = output(&engine(""), &[]).unwrap();
    assert!(
        once.notes
            .iter()
            .any(|note| note.contains("no NetworkPolicy was written") && note.contains("port 9440"))
    );
    assert!(output(&once.text, &[]).unwrap().notes.is_empty(), "nothing was written");
    let notes = output(&engine(""), &["--peer=mesh:9441", "--mesh-plaintext"]).unwrap().notes.join("\n");
    assert!(notes.contains("9441 and 9442") && notes.contains("headless Service"), "{notes}");
}

#[test]
fn an_image_is_known_by_the_last_part_of_its_name() {
    let of = |image: &str, more: &str| {
        deployment(&format!(
            "containers:\n- name: a\n  image: {image}\n{more}- name: e\n  image: vllm/vllm-openai"
        ))
    };
    for other in ["vllm/router", "registry.example:5000/vllm-project/router:v1", "vllm/router@sha256:00"] {
        let text = injected(&of(other, ""), &[]).unwrap();
        assert_eq!(text.matches("'--kv-transfer-config=").count(), 1, "{text}");
    }
    for engine in ["rocm/vllm:v1", "registry.example:5000/mine/my-vllm@sha256:00"] {
        assert!(refusal(&of(engine, ""), &[]).contains("(a, e)"), "{engine}");
    }
    assert!(refusal(&of("vllm/router", "  command: [vllm, serve]\n"), &[]).contains("(a, e)"));
}

#[test]
fn an_engine_gets_another_image_where_one_is_named() {
    let source = engine("env:\n- name: A\n  value: vllm/vllm-openai");
    let text = injected(&source, &["--engine-image=mine/vllm:1"]).unwrap();
    assert!(text.contains("image: mine/vllm:1\n") && !text.contains("pillion-connector"), "{text}");
    assert!(!text.contains("image: vllm/") && text.contains("value: vllm/vllm-openai\n"), "{text}");
    let bare = deployment("containers:\n- name: e\n  command: [vllm, serve]");
    let text = injected(&bare, &["--engine-image=mine"]).unwrap();
    assert!(text.contains("image: 'mine'\n"), "{text}");
    assert!(!injected(&text, &["--remove"]).unwrap().contains("image:"), "it had none");
}

#[test]
fn a_connector_that_is_there_stays() {
    let source = engine("args:\n- --kv-transfer-config\n- '{\"kv_connector\": \"PillionConnector\"}'");
    let text = injected(&source, &[]).unwrap();
    assert_eq!(text.matches("kv-transfer-config").count(), 1);
    assert!(text.contains("restartPolicy: Always"), "{text}");
    assert_eq!(injected(&text, &["--remove"]).unwrap().matches("PillionConnector").count(), 1);
}

#[test]
fn values_of_users_are_texts() {
    let text = injected(&engine(""), &["--cpu=it's: {odd}"]).unwrap();
    assert!(text.contains("cpu: 'it''s: {odd}'"), "{text}");
}
