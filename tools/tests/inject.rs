//! `pillion inject` on manifests as people have them: tests/inject/NAME.yaml becomes tests/inject/NAME.injected.yaml.
//! `PILLION_WRITE_INJECTED=1` writes the latter anew, to be read before they are committed.

use std::path::Path;

use clap::Parser;
use tools::inject::{self, Options};

#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    options: Options,
}

const MESH: &[&str] = &["--peer=mesh:9441", "--mesh-secret=pillion-mesh", "--node-id=$(POD_NAME)"];
const CASES: &[(&str, &[&str])] = &[
    ("documented", &[]),
    ("entrypoint", &["--copy=sidecar"]),
    ("module", MESH),
    ("exported", &["--peer=mesh:9441", "--mesh-plaintext"]),
    ("unprivileged", &["--copy=sidecar"]),
    ("batch", &[]),
];

fn injected(source: &str, more: &[&str]) -> Result<String, String> {
    let image: &[&str] = match more.iter().any(|option| option.starts_with("--image=")) {
        true => &[],
        false => &["--image=registry.example/pillion:0.3.0"],
    };
    let arguments = Arguments::try_parse_from(["inject", "--dram=30GiB"].iter().chain(image).chain(more))
        .map_err(|error| error.to_string())?;
    inject::inject(source, &arguments.options).map_err(|error| error.to_string())
}

#[test]
fn manifests_become_what_is_kept_beside_them() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/inject");
    for (name, more) in CASES {
        let source = std::fs::read_to_string(folder.join(format!("{name}.yaml"))).unwrap();
        let once = injected(&source, more).unwrap();
        let kept = folder.join(format!("{name}.injected.yaml"));
        if std::env::var_os("PILLION_WRITE_INJECTED").is_some() {
            std::fs::write(&kept, &once).unwrap();
        }
        assert_eq!(once, std::fs::read_to_string(&kept).unwrap(), "{name}");
        assert_eq!(injected(&once, more).unwrap(), once, "{name}: twice is once");
        let mut written = once.lines();
        // An entry that is added before the first one of an item takes its dash.
        let words = |line: &str| line.trim_start_matches([' ', '-']).to_owned();
        for line in source.lines().filter(|line| !line.contains("vllm serve") && !line.contains("args: [")) {
            assert!(written.any(|found| words(found) == words(line)), "{name}: {line} is kept, in its order");
        }
    }
}

/// A Deployment whose pod has these lines.
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
    assert!(refusal(none, &[]).contains("--container NAME"));
    assert!(refusal("", &[]).contains("--container NAME"));
    assert!(refusal(&engine(""), &["--container=other"]).contains("named other"));
    assert!(refusal("a: [", &[]).contains("not valid YAML"));
    let two = deployment(
        "containers:\n- name: a\n  image: vllm/vllm-openai\n- name: b\n  image: b\n  command: [vllm, serve]",
    );
    let error = refusal(&two, &[]);
    assert!(
        error.contains("Deployment a: several") && error.contains("(a, b)") && error.contains("--container"),
        "{error}"
    );
    assert!(injected(&two, &["--container=b"]).is_ok());
    for foreign in [
        "--kv-transfer-config",
        "--kv_transfer_config={\"kv_connector\":\"Other\"}",
        "--kv-transfer-config.kv_connector=X",
    ] {
        let error = refusal(&engine(&format!("args: ['{foreign}']")), &[]);
        assert!(error.contains("remove it"), "{error}");
    }
    for offloads in ["--kv-offloading-size=4", "--kv_offloading_size"] {
        let error = refusal(&engine(&format!("args: ['{offloads}']")), &[]);
        assert!(error.contains("--kv-offloading-size") && error.contains("take it off"), "{error}");
    }
    let network = deployment("hostNetwork: true\ncontainers:\n- name: e\n  image: vllm/vllm-openai");
    assert!(injected(&network, &[]).is_ok());
    let peers = ["--peer=mesh:9441", "--mesh-plaintext"];
    assert!(refusal(&network, &peers).contains("--node-id '$(POD_NAME)'"));
    assert!(refusal(&network, &peers[..1]).contains("--mesh-secret"));
    assert!(refusal(&engine("securityContext:\n  runAsUser: 7"), &[]).contains("runAsGroup"));
    assert!(refusal(&engine("securityContext:\n  runAsNonRoot: true"), &[]).contains("runAsGroup"));
    assert!(refusal(&engine("command: [run.sh]"), &[]).contains("by hand"));
    assert!(refusal(&engine("command: [sh, -c, vllm serve a]"), &[]).contains("quotes"));
    assert!(refusal(&engine("command: [sh, -c, 'bash -c \"vllm serve a\"']"), &[]).contains("by hand"));
    assert!(refusal(&engine("command: [sh, -c, 'vllm serve a; vllm serve b']"), &[]).contains("by hand"));
    assert!(refusal(&engine("env: []"), &[]).contains("leave it out"));
    assert!(refusal(&engine("env:"), &[]).contains("leave it out"));
    let sidecar =
        deployment("initContainers:\n- name: pillion\ncontainers:\n- name: e\n  image: vllm/vllm-openai");
    assert!(refusal(&sidecar, &[]).contains("remove the former"));
    let several_nodes = "kind: LeaderWorkerSet\nmetadata:\n  name: l\nspec:\n  leaderWorkerTemplate:\n    workerTemplate:\n      \
                         spec:\n        containers:\n        - name: e\n          image: vllm/vllm-openai\n";
    assert!(refusal(several_nodes, &[]).contains("several nodes"));
}

#[test]
fn words_that_look_like_the_program_are_left_alone() {
    let script = "# start the vllm server\necho a vllm server starts\nexec python3 -m vllm.entrypoints.openai.api_server --model a\n";
    let lines: String = script.lines().map(|line| format!("  {line}\n")).collect();
    let text = injected(&engine(&format!("args:\n- |\n{lines}")), &[]).unwrap();
    assert_eq!(text.matches("--kv-transfer-config=").count(), 1);
    assert!(
        text.contains("api_server --kv-transfer-config=") && text.contains("# start the vllm server\n"),
        "{text}"
    );
    let waits = "containers:\n- name: c\n  image: curl\n  args: ['echo waiting for the vllm server']\n";
    assert!(refusal(&deployment(waits), &[]).contains("no container"));
}

#[test]
fn what_is_not_understood_and_runs_vllm_is_told_of() {
    let rollout = engine("").replace("Deployment", "Rollout");
    let (mut output, mut notes) = (Vec::new(), Vec::new());
    let arguments = Arguments::try_parse_from(["inject", "--dram=1GiB", "--image=i"]).unwrap();
    let source = format!("{}---\n{rollout}---\nkind: Service\n", engine(""));
    inject::serve(source.as_bytes(), &mut output, &mut notes, &arguments.options).unwrap();
    let notes = String::from_utf8(notes).unwrap();
    let [told, _, _] = notes.lines().collect::<Vec<_>>()[..] else { panic!("three notes: {notes}") };
    assert!(told.starts_with("pillion inject: Rollout a runs vLLM"), "{notes}");
    assert!(refusal(&rollout, &[]).contains("Deployments"));
}

#[test]
fn what_is_left_to_add_is_told_of_once() {
    let noted = |source: &str, more: &[&str]| {
        let arguments = [&["inject", "--dram=1GiB", "--image=i"], more].concat();
        let options = Arguments::try_parse_from(arguments).unwrap().options;
        let (mut output, mut notes) = (Vec::new(), Vec::new());
        inject::serve(source.as_bytes(), &mut output, &mut notes, &options).unwrap();
        (String::from_utf8(output).unwrap(), String::from_utf8(notes).unwrap())
    };
    let (once, notes) = noted(&engine(""), &[]);
    assert!(notes.contains("no NetworkPolicy was written") && notes.contains("port 9440"), "{notes}");
    let image =
        "Deployment a: container e runs vllm/vllm-openai, in which vLLM starts only with Pillion's wheel";
    assert!(
        notes.contains(image) && notes.contains("docs/deploy.md") && notes.contains("--engine-image"),
        "{notes}"
    );
    assert!(noted(&engine(""), &["--engine-image=mine"]).1.contains("container e runs mine, in which"));
    assert_eq!(noted(&once, &[]).1, "", "nothing was written");
    let (_, notes) = noted(&engine(""), &["--peer=mesh:9441", "--mesh-plaintext"]);
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
        assert_eq!(text.matches("--kv-transfer-config=").count(), 1, "{text}");
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
    assert!(text.contains("  image: 'mine/vllm:1'\n"), "{text}");
    assert!(!text.contains("image: vllm/") && text.contains("value: vllm/vllm-openai\n"), "{text}");
    let bare = deployment("containers:\n- name: e\n  command: [vllm, serve]");
    assert!(injected(&bare, &["--engine-image=mine"]).unwrap().contains("  image: 'mine'\n"));
    for quoted in
        ["'vllm/vllm-openai'  # stock", "\"vllm/vllm-openai\"  # stock", "vllm/vllm-openai  # stock"]
    {
        let text =
            injected(&source.replacen("vllm/vllm-openai", quoted, 1), &["--engine-image=mine"]).unwrap();
        assert!(text.contains("  image: 'mine'  # stock\n"), "{text}");
    }
    let folded = source.replacen("image: ", "image: >-\n          ", 1);
    assert!(refusal(&folded, &["--engine-image=mine"]).contains("on one line"));
}

#[test]
fn a_connector_that_is_there_stays() {
    let source = engine("args:\n- --kv-transfer-config\n- '{\"kv_connector\": \"PillionConnector\"}'");
    let text = injected(&source, &[]).unwrap();
    assert_eq!(text.matches("kv-transfer-config").count(), 1);
    assert!(text.contains("restartPolicy: Always"), "{text}");
}

#[test]
fn values_of_users_are_texts() {
    let text = injected(&engine(""), &["--image=it's: {odd}"]).unwrap();
    assert!(text.contains("image: 'it''s: {odd}'"), "{text}");
}
