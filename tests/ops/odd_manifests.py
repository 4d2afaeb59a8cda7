"""Odd manifests: hard to read or to change. Each names the pods or the refusal of `pillion inject`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from textwrap import indent


@dataclass(frozen=True)
class Odd:
    """A stream of manifests. `pods` of its pods get a sidecar, beside the container `engine`."""

    name: str
    text: str
    # Words of the remedy on stderr, with status 1.
    refused: str = ""
    # One without a refusal, none with one.
    stated_pods: int | None = None
    options: tuple[str, ...] = ()

    @property
    def pods(self) -> int:
        """The number of pods with a sidecar afterwards."""
        return int(not self.refused) if self.stated_pods is None else self.stated_pods


HEAD = """\
apiVersion: apps/v1
kind: Deployment
metadata:
  name: a
spec:
  selector:
    matchLabels: {app: a}
  template:
    metadata:
      labels: {app: a}
    spec:
"""
ENGINE = "- name: engine\n  image: vllm/vllm-openai:v0.32.0\n"
SERVICE = "apiVersion: v1\nkind: Service\nmetadata: {name: s}\nspec: {ports: [{port: 80}]}\n"
BARE = {"name": "engine", "image": "vllm/vllm-openai:v0.32.0", "args": ["--model=a"]}


def deployment(pod: str) -> str:
    """A Deployment with these lines in its pod."""
    return HEAD + indent(pod, "      ")


def engine(lines: str, beside: str = "") -> str:
    """A Deployment with these lines in its engine, and others of the pod behind it."""
    return deployment("containers:\n" + ENGINE + indent(lines, "  ") + beside)


def of(kind: str, version: str, spec: str, pod: str = "") -> str:
    """An object of another kind; `spec` has `POD` where the pod is."""
    described = "{containers: [{name: engine, image: vllm/vllm-openai}]" + pod + "}"
    return f"apiVersion: {version}\nkind: {kind}\nmetadata: {{name: a}}\nspec: {spec.replace('POD', described)}\n"


def script(line: str) -> str:
    """An engine behind a shell."""
    return engine(f"command: [/bin/sh, -c]\nargs:\n- |\n{indent(line, '  ')}\n")


def config(connector: str, quote: str = "'") -> str:
    """The option of another connector, quoted."""
    return f"--kv-transfer-config {quote}{json.dumps({'kv_connector': connector, 'kv_role': 'kv_both'})}{quote}"


JSON = json.dumps(
    {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": {"containers": [BARE], "nodeName": "n"}}
)
PLAIN = engine("args: [--model=a]\n")
NIXL = 'args: [--kv-transfer-config, \'{"kv_connector": "NixlConnector", "kv_role": "kv_both"}\''

LINES = [
    Odd("lines that end as on Windows", (PLAIN + "---\n" + SERVICE).replace("\n", "\r\n")),
    Odd("lines that end as on old Macs", PLAIN.replace("\n", "\r")),
    Odd("a byte order mark", "\ufeff" + PLAIN),
    Odd("no line end at the end", PLAIN.rstrip("\n")),
    Odd("tabs behind values", PLAIN.replace("name: a\n", "name: a\t\n")),
    Odd("tabs before values", PLAIN.replace("name: a\n", "name:\ta\n"), "write it as `kubectl get -o yaml` does"),
    Odd("tabs before keys", PLAIN.replace("  name: a", "\tname: a"), "not valid YAML"),
    Odd("comments at every place", "# a\n" + PLAIN.replace("\n", " # b\n#c\n") + "# d\n---\n# e\n"),
    Odd("empty documents", f"---\n---\n# nothing\n---\n{PLAIN}---\n---\nnull\n---\n{SERVICE}"),
    Odd("a comment behind the line of a document", f"--- # first\n{PLAIN}--- # second\n{SERVICE}"),
    Odd("the end of a document", f"{PLAIN}...\n---\n{SERVICE}"),
    Odd("the end of a document in place of a beginning", f"{PLAIN}...\n{SERVICE}", "--- between documents"),
    Odd("a version of YAML", f"%YAML 1.2\n---\n{PLAIN}"),
    Odd("a document that is no YAML beside a right one", f"a: [\n---\n{PLAIN}", "not valid YAML", 1),
    Odd("no manifest at all", "just words\n", "found no container"),
    Odd("nothing", "", "found no container"),
    Odd("a thousand levels", "a: " + "[" * 1000 + "]" * 1000 + "\n---\n" + PLAIN, "recursion limit", 1),
]
SCALARS = [
    Odd(
        "strings that look like other types",
        engine(
            "env:\n"
            + "".join(
                f"- {{name: A, value: '{text}'}}\n" for text in ("yes", "no", "0777", "1e3", "0x1F", "1:30", "null", "~", "")
            )
        ),
    ),
    Odd("numbers as they are", engine("ports: [{containerPort: 0o17}, {containerPort: 0777}, {containerPort: 1_000}]\n")),
    Odd("a huge number", PLAIN.replace("spec:\n  sel", "spec:\n  generation: 123456789012345678901234567890\n  sel", 1)),
    Odd("truths of an older YAML", deployment(f"hostNetwork: off\nhostPID: Yes\ncontainers:\n{ENGINE}")),
    Odd("tags", engine("env: [{name: A, value: !!str 7}, {name: B, value: !!str yes}]\n")),
    Odd("a tag of a list", engine("args: !!set {--model=a}\n"), "tag"),
    Odd("keys in quotes", PLAIN.replace("name: engine", '"name": engine').replace("args:", "'args':")),
    Odd(
        "keys without values",
        deployment(f"nodeSelector:\ntolerations: ~\nvolumes:\ninitContainers: null\ncontainers:\n{ENGINE}"),
    ),
    Odd("an engine's lists without values", engine("args:\nenv:\nvolumeMounts:\n")),
    Odd("lists without items", engine("args: []\nenv: []\nvolumeMounts: []\n")),
    Odd("annotations without values", PLAIN.replace("  name: a\n", "  name: a\n  annotations:\n", 1)),
    Odd("annotations without entries", PLAIN.replace("  name: a\n", "  name: a\n  annotations: {}\n", 1)),
    Odd("a plain text over several paragraphs", engine("args:\n- --a\n  b\n\n  c\n")),
    Odd(
        "folded and literal texts",
        engine(
            "env:\n- name: A\n  value: >-\n    a\n    b\n\n    c\n- name: B\n  value: |+\n    a\n\n     b\n\n"
            "- name: C\n  value: |2\n     a\n"
        ),
    ),
    Odd("spaces at the ends of a text's lines", engine("env:\n- name: A\n  value: |\n    a  \n    \tb\t\n      \n    c\n")),
    Odd("characters that no line shows", engine('env: [{name: A, value: "a\\u0085b\\u2028c\\ufeffd\\0e\\ud7ff"}]\n')),
    Odd("letters of other scripts, and pictures", engine("args: [--served-model-name=模型-\U0001f680, 'é: #']\n")),
    Odd(
        "texts with signs of YAML",
        engine("args: ['a: b', '#c', '- d', '*e', '&f', '!g', '%h', '@i', '`j', \"'k'\", '\"l\"', ', ', '{', '']\n"),
    ),
    Odd("a key of two lines", PLAIN + '  "a\\nb": c\n'),
    Odd("a long key", PLAIN + f"  {'k' * 900}: c\n"),
    Odd("a list as a key", PLAIN + "  ? [a]\n  : b\n", "key"),
    Odd("bytes of another encoding", PLAIN.replace("--model=a", "--model=\udce9"), "UTF-8"),
]
SHAPES = [
    Odd(
        "flow mappings",
        "{apiVersion: v1, kind: Pod, metadata: {name: a}, spec: {containers: [{name: engine, image: vllm/vllm-openai}]}}\n",
    ),
    Odd("a bracket at its key's column", PLAIN.replace("[--model=a]", "[\n          --model=a\n        ]")),
    Odd("JSON", JSON),
    Odd("JSON over lines, with tabs", json.dumps(json.loads(JSON), indent="\t")),
    Odd("JSON with escapes", JSON.replace("--model=a", "\\/models\\/\\u00e9\\u0007")),
    Odd(
        "JSON with halves of a character", JSON.replace("--model=a", "\\ud83d\\ude80"), "write it as `kubectl get -o yaml` does"
    ),
    Odd("JSON with a huge number", JSON.replace('"n"', "123456789012345678901234567890")),
    Odd("two objects of JSON", JSON + "\n" + JSON, "--- between documents"),
    Odd(
        "an anchor of two containers",
        engine(
            "env: &env [{name: A, value: b}]\nvolumeMounts: &mounts [{name: v, mountPath: /v}]\n",
            "- {name: other, image: other, env: *env, volumeMounts: *mounts}\nvolumes: [{name: v, emptyDir: {}}]\n",
        ),
    ),
    Odd(
        "an anchor of two pods",
        "x: &pod\n  containers: [{name: engine, image: vllm/vllm-openai}]\n"
        + of("Deployment", "apps/v1", "{template: {spec: *pod}, other: {spec: *pod}}"),
        stated_pods=3,
    ),
    Odd(
        "an anchor that is made twice",
        engine("env: [&e {name: A, value: b}, &e {name: B, value: c}]\n", "- {name: other, image: other, env: [*e]}\n"),
    ),
    Odd("an alias without an anchor", engine("env: *nothing\n"), "not valid YAML"),
    Odd("an anchor within itself", engine("env: &e [*e]\n"), "anchor"),
    Odd("an anchor of another document", f"a: &a b\n---\n{engine('env: *a')}\n", "not valid YAML"),
    Odd(
        "a merge key",
        "x: &x {image: vllm/vllm-openai, args: [--model=b]}\n" + deployment("containers:\n- <<: *x\n  name: engine\n"),
    ),
    Odd(
        "a merge key, and its keys in quotes",
        'x: &x {"image": vllm/vllm-openai, "args": [b]}\n' + deployment("containers:\n- <<: *x\n  name: engine\n  args: [c]\n"),
    ),
    Odd(
        "a merge key of several maps",
        "x: [&x {image: vllm/vllm-openai, tty: true}, &y {image: other, stdin: true}]\n"
        + deployment("containers:\n- name: engine\n  <<: [*x, *y]\n"),
    ),
    Odd("a merge key of nothing", deployment(f"<<:\ncontainers:\n{ENGINE}"), "merge key"),
    Odd("a key that is there twice", engine("args: [a]\nargs: [b]\n"), "args is there twice with different values"),
    Odd("a key that is there twice with one value", engine("args: [a]\n'args': ['a']\n")),
    Odd(
        "a key that is there twice, once in quotes",
        engine("args: [a]\n'args': [b]\n"),
        "args is there twice with different values",
    ),
    Odd(
        "a key that is there twice beside a right object",
        engine("args: [a]\nargs: [b]\n") + f"---\n{PLAIN}",
        "args is there twice with different values",
        1,
    ),
    Odd(
        "a bomb of anchors",
        "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40)) + f"---\n{PLAIN}",
        "more than",
        1,
    ),
]
KINDS = [
    Odd("a Pod", of("Pod", "v1", "POD")),
    Odd("a Job", of("Job", "batch/v1", "{template: {spec: POD}}", ", restartPolicy: Never")),
    Odd(
        "a CronJob",
        of(
            "CronJob",
            "batch/v1",
            "{schedule: '0 3 * * *', jobTemplate: {spec: {template: {spec: POD}}}}",
            ", restartPolicy: Never",
        ),
    ),
    Odd("a DaemonSet", of("DaemonSet", "apps/v1", "{selector: {}, template: {spec: POD}}")),
    Odd("a StatefulSet", of("StatefulSet", "apps/v1", "{serviceName: a, selector: {}, template: {spec: POD}}")),
    Odd(
        "a PodTemplate",
        of("PodTemplate", "v1", "POD")
        .replace("spec: {", "template: {spec: {")
        .replace("]}", "]}}")
        .replace("name: a}", "generateName: a-}"),
    ),
    Odd(
        "a LeaderWorkerSet",
        of("LeaderWorkerSet", "leaderworkerset.x-k8s.io/v1", "{leaderWorkerTemplate: {workerTemplate: {spec: POD}}}"),
    ),
    Odd(
        "a LeaderWorkerSet of several nodes",
        of(
            "LeaderWorkerSet",
            "leaderworkerset.x-k8s.io/v1",
            "{leaderWorkerTemplate: {size: 2, leaderTemplate: {spec: POD}, workerTemplate: {spec: POD}}}",
        ),
        "one pod for each engine",
    ),
    Odd("an InferenceService with a container", of("InferenceService", "serving.kserve.io/v1beta1", "{predictor: POD}")),
    Odd(
        "an InferenceService without one",
        of(
            "InferenceService",
            "serving.kserve.io/v1beta1",
            "{predictor: {model: {image: vllm/vllm-openai, modelFormat: {name: vllm}}}}",
        ),
        "let its operator render the pod",
    ),
    Odd(
        "an LLMInferenceService with workers",
        of("LLMInferenceService", "serving.kserve.io/v1alpha1", "{template: POD, prefill: {template: POD}}"),
        stated_pods=2,
    ),
    Odd(
        "a List of kinds",
        f"apiVersion: v1\nkind: List\nitems:\n- {JSON}\n"
        "- {apiVersion: v1, kind: ConfigMap, metadata: {name: c}, data: {a: 'containers: []'}}\n",
    ),
    Odd(
        "a list of Deployments, one refused",
        "apiVersion: v1\nkind: DeploymentList\nitems:\n"
        + "".join("- " + indent(text, "  ").lstrip() for text in (engine("command: [run.sh]\n"), PLAIN)),
        "pillion/inject",
        1,
    ),
    Odd(
        "a manifest within a ConfigMap",
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\ndata:\n  pod.yaml: |\n" + indent(PLAIN, "    "),
        "found no container",
    ),
    Odd(
        "no metadata",
        "apiVersion: v1\nkind: Pod\nspec: {containers: [{name: engine, image: vllm/vllm-openai}]}\n",
        "give it a name",
    ),
    Odd(
        "containers without names",
        "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec: {containers: [{image: vllm/vllm-openai}]}\n",
        "give each container a name",
    ),
]
PODS = [
    Odd(
        "a container before the engine, and init containers",
        deployment(
            "initContainers:\n- {name: i, image: vllm/vllm-openai, command: [hf, download]}\n"
            "- {name: p, image: p, restartPolicy: Always}\ncontainers:\n- {name: other, image: vllm/router}\n" + ENGINE
        ),
    ),
    Odd("two engines", engine("", "- {name: e, image: other, command: [vllm, serve]}\n"), "--container NAME"),
    Odd(
        "two engines, one named",
        engine("", "- {name: e, image: other, command: [vllm, serve]}\n"),
        options=("--container=engine",),
    ),
    Odd("two containers of one name", engine("", "- {name: engine, image: other}\n"), "name them differently"),
    Odd("a volume of a name of ours", engine("", "volumes: [{name: pillion-socket, emptyDir: {}}]\n"), "pillion-socket"),
    Odd(
        "an init container of a name of ours",
        engine("", "initContainers: [{name: pillion-connector, image: x}]\n"),
        "pillion-connector",
    ),
    Odd(
        "a mount at a place of ours",
        engine("volumeMounts: [{name: v, mountPath: /opt/pillion/}]\n", "volumes: [{name: v, emptyDir: {}}]\n"),
        "mount it elsewhere",
    ),
    Odd(
        "a sidecar that was written by hand",
        engine(NIXL.replace("Nixl", "Pillion") + "]\n", "initContainers: [{name: pillion, image: x, restartPolicy: Always}]\n"),
        stated_pods=0,
    ),
    Odd(
        "a sidecar that no engine uses",
        engine("", "initContainers: [{name: pillion, image: x, restartPolicy: Always}]\n"),
        "remove that container",
    ),
    Odd(
        "volumes beside those of the chart",
        engine("volumeMounts: [{name: pillion-disk, mountPath: /d}]\n", "volumes: [{name: pillion-disk, emptyDir: {}}]\n"),
        options=("--mount=pillion-disk:/nvme0", "--", "--ssd=/nvme0/blocks:1GiB"),
    ),
    Odd(
        "the pod's user",
        deployment(f"securityContext: {{runAsUser: 1000, runAsGroup: 2000, runAsNonRoot: true}}\ncontainers:\n{ENGINE}"),
    ),
    Odd("a user without a group", engine("securityContext: {runAsUser: 1000}\n"), "runAsGroup"),
    Odd("a group in another base", engine("securityContext: {runAsUser: 1000, runAsGroup: 0o17}\n"), "decimal"),
    Odd("a user that the image has", engine("securityContext: {runAsNonRoot: true}\n"), "set runAsUser and runAsGroup"),
    Odd(
        "an object to leave as it is",
        engine("").replace("  name: a\n", "  name: a\n  annotations: {pillion/inject: 'false'}\n", 1) + f"---\n{PLAIN}",
    ),
    Odd("resources of the whole pod", deployment(f"resources: {{limits: {{memory: 64Gi}}}}\ncontainers:\n{ENGINE}")),
]
ENVIRONMENTS = [
    Odd(
        "variables from elsewhere",
        engine(
            "envFrom: [{secretRef: {name: s}}]\n"
            "env: [{name: A, valueFrom: {secretKeyRef: {name: s, key: k}}}, {name: B, value: $(A)}]\n"
        ),
    ),
    Odd("a seed that is there", engine("env: [{name: PYTHONHASHSEED, value: '42'}]\n")),
    Odd("a path of Python", engine("env: [{name: PYTHONPATH, value: '/a:$(B)'}]\n")),
    Odd("an empty path of Python", engine("env: [{name: PYTHONPATH, value: ''}]\n")),
    Odd("a path of Python twice", engine("env: [{name: PYTHONPATH, value: /a}, {name: PYTHONPATH, value: /b}]\n"), "keep one"),
    Odd(
        "a path of Python from elsewhere",
        engine("env: [{name: PYTHONPATH, valueFrom: {configMapKeyRef: {name: a, key: b}}}]\n"),
        "--engine-image",
    ),
    Odd("variables that are no list", engine("env: {A: b}\n"), "write one"),
]
COMMANDS = [
    Odd("no command line", engine("")),
    Odd("a command alone", engine("command: [vllm, serve, a]\n")),
    Odd("a command and arguments", engine("command: [vllm]\nargs: [serve, a]\n")),
    Odd("arguments of the image's program", engine("args: [serve, a]\n")),
    Odd("a module", engine("command: [python3, -m]\nargs: [vllm.entrypoints.openai.api_server, --model, a]\n")),
    Odd("another command", engine("command: [vllm, bench, serve]\n"), "pillion/inject"),
    Odd("a command that is a text", engine("command: vllm serve a\n"), "write one"),
    Odd("arguments that are a text", engine("args: --model a\n"), "write one"),
    Odd("arguments that are numbers", engine("args: [--port, 8000, --seed, 0o17]\n")),
    Odd("a script", script('set -e\nexec vllm serve a \\\n  --port 8000 "$@"\n')),
    Odd("a script of two engines", script("if true; then vllm serve a; else vllm serve b; fi\n")),
    Odd(
        "a script with words in a comment",
        script("# --kv-transfer-config needs a newer vllm serve\nvllm serve a # --kv-transfer-config\n"),
    ),
    Odd("a script in a script", engine('command: [bash, -c, "eval \\"vllm serve $MODEL ${MORE}\\""]\n')),
    Odd("another connector", engine(NIXL + "]\n")),
    Odd("another connector, replaced", engine(NIXL + "]\n"), options=("--replace-connector",)),
    Odd("another connector in a script", script(f"vllm serve a {config('NixlConnector')} --port 8000\n")),
    Odd(
        "another connector in a script, escaped",
        script(f"vllm serve a {config('NixlConnector', chr(34))}\n".replace('"kv', '\\"kv')),
        "write it as one",
    ),
    Odd("another connector from a variable", engine("args: [--kv-transfer-config, $(CONFIG)]\n"), "write it as one"),
    Odd("two other connectors", engine(NIXL + ", " + NIXL.partition("[")[2] + "]\n"), "keep one"),
    Odd(
        "a connector by names with dots", engine("args: [--kv-transfer-config.kv_connector=NixlConnector]\n"), "write it as one"
    ),
    Odd("this connector", engine(NIXL.replace("Nixl", "Pillion") + "]\n")),
]
ALL = LINES + SCALARS + SHAPES + KINDS + PODS + ENVIRONMENTS + COMMANDS
