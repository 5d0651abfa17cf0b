package patch

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const document = `# the node of the kitchen
version: v1alpha1
machine:
  type: worker # it has no memory
  token: abcdef.0123456789abcdef

  # two networks
  network:
    hostname: kitchen
    interfaces:
      # the wall
      - interface: eth0
        dhcp: true
      # the air
      - interface: wlan0
        mtu: 1400
        vlans:
          - {vlanId: 5, mtu: 1300}
  time:
    servers: [a, b]
  files:
    - path: /etc/motd
      permissions: 0644
      content: |
        # hello

        there
  env:
    http_proxy: http://proxy:3128
cluster:
  apiServer:
    image: registry.k8s.io/kube-apiserver:v1.36.1 # not newer
`

// lines are what the patch removes from (-) and adds to (+) the document.
func lines(t *testing.T, doc, patch string) string {
	t.Helper()
	out, err := Apply([]byte(doc), []byte(patch))
	if err != nil {
		return "error: " + err.Error()
	}
	return changed(strings.SplitAfter(doc, "\n"), strings.SplitAfter(string(out), "\n"))
}

// changed is a line diff by the longest common subsequence.
func changed(a, b []string) string {
	common := make([][]int, len(a)+1)
	for i := range common {
		common[i] = make([]int, len(b)+1)
	}
	for i := len(a) - 1; i >= 0; i-- {
		for j := len(b) - 1; j >= 0; j-- {
			if common[i][j] = max(common[i+1][j], common[i][j+1]); a[i] == b[j] {
				common[i][j] = common[i+1][j+1] + 1
			}
		}
	}
	var out strings.Builder
	i, j := 0, 0
	for i < len(a) || j < len(b) {
		switch {
		case i < len(a) && j < len(b) && a[i] == b[j]:
			i, j = i+1, j+1
		case i < len(a) && (j == len(b) || common[i+1][j] >= common[i][j+1]):
			out.WriteString("-" + a[i])
			i++
		default:
			out.WriteString("+" + b[j])
			j++
		}
	}
	return out.String()
}

func want(t *testing.T, want, got string) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

var patches = []struct{ name, patch, want string }{
	// JSON patches. S-029
	{"replace", `[{"op": "replace", "path": "/cluster/apiServer/image", "value": "registry.k8s.io/kube-apiserver:v1.36.2"}]`,
		"-    image: registry.k8s.io/kube-apiserver:v1.36.1 # not newer\n+    image: registry.k8s.io/kube-apiserver:v1.36.2 # not newer\n"},
	{"add", `[{"op": "add", "path": "/cluster/aggregatorCA", "value": {"crt": "QUFB", "key": "QkJC"}}]`, "+  aggregatorCA:\n+    crt: QUFB\n+    key: QkJC\n"},
	{"add what is there", `[{"op": "add", "path": "/machine/network/hostname", "value": "cellar"}]`, "-    hostname: kitchen\n+    hostname: cellar\n"},
	{"add behind the last", `[{"op": "add", "path": "/machine/network/interfaces/-", "value": {"interface": "eth1", "mtu": 9000}}]`, "+      - interface: eth1\n+        mtu: 9000\n"},
	{"add before the first", `[{"op": "add", "path": "/machine/network/interfaces/0", "value": {"interface": "eth1"}}]`, "+      - interface: eth1\n"},
	{"add to a list in one line", `[{"op": "add", "path": "/machine/time/servers/1", "value": "c"}]`, "-    servers: [a, b]\n+    servers: [a, c, b]\n"},
	{"remove", `[{"op": "remove", "path": "/machine/network/interfaces/0"}]`, "-      # the wall\n-      - interface: eth0\n-        dhcp: true\n"},
	{"remove a mapping", `[{"op": "remove", "path": "/machine/env"}]`, "-  env:\n-    http_proxy: http://proxy:3128\n"},
	{"move", `[{"op": "move", "from": "/machine/network/hostname", "path": "/machine/env/a~1b"}]`, "-    hostname: kitchen\n+    a/b: kitchen\n"},
	{"copy", `[{"op": "copy", "from": "/machine/time/servers/0", "path": "/machine/time/servers/-"}]`, "-    servers: [a, b]\n+    servers: [a, b, a]\n"},
	{"test", `[{"op": "test", "path": "/machine/type", "value": "worker"}, {"op": "test", "path": "/machine/files/0/permissions", "value": "0644"}]`, ""},
	{"in YAML", "- op: replace\n  path: /machine/network/interfaces/1/mtu\n  value: 1450\n", "-        mtu: 1400\n+        mtu: 1450\n"},
	{"lines", `[{"op": "replace", "path": "/machine/files/0/content", "value": "one\ntwo\n"}]`, "-        # hello\n-\n-        there\n+        one\n+        two\n"},
	{"a number that is text", `[{"op": "add", "path": "/machine/env/n", "value": "0644"}]`, "+    n: \"0644\"\n"},
	{"nothing", `[]`, ""},
	{"remove everything", `[{"op": "remove", "path": ""}]`, `error: patch: operation 1: path "" doesn't start with a slash; did you mean "/"`},
	// The error of an operation that isn't possible says what is possible. S-031
	{"replace what isn't there", `[{"op": "replace", "path": "/cluster/apiServer/certSANs", "value": ["x"]}]`,
		"error: patch: operation 1: replace: there is no /cluster/apiServer/certSANs in the configuration; use add instead of replace"},
	{"replace deeper", `[{"op": "test", "path": "/machine/type", "value": "worker"}, {"op": "replace", "path": "/cluster/scheduler/image", "value": "x"}]`,
		"error: patch: operation 2: replace /cluster/scheduler/image: there is no /cluster/scheduler in the configuration; add /cluster/scheduler first, with the rest inside of its value"},
	{"add deeper", `[{"op": "add", "path": "/cluster/scheduler/image", "value": "x"}]`,
		"error: patch: operation 1: add /cluster/scheduler/image: there is no /cluster/scheduler in the configuration; add /cluster/scheduler first, with the rest inside of its value"},
	{"remove what isn't there", `[{"op": "remove", "path": "/machine/sysctls"}]`, "error: patch: operation 1: remove: there is no /machine/sysctls in the configuration"},
	{"move what isn't there", `[{"op": "move", "from": "/a/b", "path": "/c"}]`, "error: patch: operation 1: move: there is no /a in the configuration"},
	{"beyond the end", `[{"op": "replace", "path": "/machine/network/interfaces/2/mtu", "value": 1}]`,
		"error: patch: operation 1: replace: there is no /machine/network/interfaces/2 in the configuration; the list has 2 entries, counted from 0, and - is behind the last"},
	{"test fails", `[{"op": "test", "path": "/machine/type", "value": "init"}]`, "error: patch: operation 1: test: /machine/type isn't what the patch expects"},
	{"everything becomes a number", `[{"op": "replace", "path": "", "value": 1}]`, "error: patch: operation 1: replace: the value isn't a configuration"},
	{"beyond the end by a move", `[{"op": "move", "from": "/machine/network/interfaces/0", "path": "/machine/network/interfaces/3"}]`,
		"error: patch: operation 1: move: there is no /machine/network/interfaces/3 in the configuration; the list has 2 entries, counted from 0, and - is behind the last"},
	{"no path", `[{"op": "add", "value": 1}]`, "error: patch: operation 1: add lacks path"},
	{"no value", `[{"op": "add", "path": "/a"}]`, "error: patch: operation 1: add lacks value"},
	{"no from", `[{"op": "copy", "path": "/a"}]`, "error: patch: operation 1: copy lacks from"},
	{"dots", `[{"op": "add", "path": ".machine.env", "value": {}}]`, `error: patch: operation 1: path ".machine.env" doesn't start with a slash; did you mean "/machine/env"`},
	{"odd operation", `[{"op": "set", "path": "/a", "value": 1}]`, `error: patch: operation 1: op "set" is not one of add, remove, replace, move, copy, test`},
	{"one operation", `{"op": "add", "path": "/a", "value": 1}`, "error: patch: a JSON patch is a list; put the operation in brackets: [{…}]"},
	{"into itself", `[{"op": "move", "from": "/machine", "path": "/machine/network"}]`, "error: patch: operation 1: /machine can't be moved into itself"},
	{"no patch", `x`, "error: patch: the patch is neither a list of operations nor a mapping to merge"},
	{"empty", ``, "error: patch: the patch is empty"},
	// Strategic merge patches.
	{"merge", "machine:\n  time: {bootTimeout: 5s}\n  env: {no_proxy: x}\n", "+    bootTimeout: 5s\n+    no_proxy: x\n"},
	{"merge JSON", `{"machine": {"network": {"nameservers": ["10.0.0.1"]}}}`, "+    nameservers:\n+      - 10.0.0.1\n"},
	{"merge the same", "machine:\n  type: worker\n  time: {servers: [a, b]}\n  network: {interfaces: [{interface: eth0}]}\n", ""},
	{"list without identity", "machine:\n  time:\n    servers: [c]\n", "-    servers: [a, b]\n+    servers: [c]\n"},
	{"null", "machine:\n  env: null\n", "-  env:\n-    http_proxy: http://proxy:3128\n"},
	{"null of nothing", "machine:\n  sysctls: null\n", ""},
	{"delete", "machine:\n  env: {$patch: delete}\n", "-  env:\n-    http_proxy: http://proxy:3128\n"},
	{"replace a mapping", "machine:\n  env: {$patch: replace, a: b}\n", "-    http_proxy: http://proxy:3128\n+    a: b\n"},
	{"entry", "machine:\n  network:\n    interfaces:\n      - interface: wlan0\n        mtu: 1450\n", "-        mtu: 1400\n+        mtu: 1450\n"},
	{"new entry", "machine:\n  network:\n    interfaces:\n      - interface: eth1 # new\n        mtu: 9000\n", "+      - interface: eth1 # new\n+        mtu: 9000\n"},
	{"entry of an entry", "machine: {network: {interfaces: [{interface: wlan0, vlans: [{vlanId: 5, mtu: 1200}]}]}}", "-          - {vlanId: 5, mtu: 1300}\n+          - {vlanId: 5, mtu: 1200}\n"},
	{"delete an entry", "machine: {network: {interfaces: [{interface: eth0, $patch: delete}]}}", "-      # the wall\n-      - interface: eth0\n-        dhcp: true\n"},
	{"delete no entry", "machine: {network: {interfaces: [{interface: eth7, $patch: delete}]}}", ""},
	{"two entries of a name", "machine: {network: {interfaces: [{interface: lo, cidr: 10.0.0.1/8}, {interface: lo, cidr: 10.0.0.2/8}]}}", "+      - {interface: lo, cidr: 10.0.0.1/8}\n+      - {interface: lo, cidr: 10.0.0.2/8}\n"},
	{"replace an entry", "machine: {network: {interfaces: [{interface: eth0, $patch: replace, mtu: 9000}]}}", "-        dhcp: true\n+        mtu: 9000\n"},
	{"replace a list", "machine: {network: {interfaces: [{$patch: replace}, {interface: eth5}]}}",
		"-      # the wall\n-      - interface: eth0\n-        dhcp: true\n-      # the air\n-      - interface: wlan0\n-        mtu: 1400\n-        vlans:\n-          - {vlanId: 5, mtu: 1300}\n+      - {interface: eth5}\n"},
	{"file", "machine: {files: [{path: /etc/motd, content: x}, {path: /etc/issue, content: y}]}", "-      content: |\n-        # hello\n-\n-        there\n+      content: x\n+    - {path: /etc/issue, content: y}\n"},
	{"entry without identity", "machine: {files: [{content: x}]}", "error: patch: machine.files: an entry has no path, which identifies it"},
	{"odd directive", "machine: {$patch: remove}", `error: patch: machine: $patch: "remove" is not one of delete, replace, merge`},
	{"everything", "$patch: delete", "error: patch: the patch deletes the whole configuration"},
}

func TestApplyToNoConfiguration(t *testing.T) {
	for doc, message := range map[string]string{
		"0": "patch: the configuration is not a mapping", "": "patch: the configuration is empty", "a: [": "patch: the configuration line 1: not valid YAML: did not find expected node content",
	} {
		for _, patch := range []string{"[]", "a: 1", `[{"op": "add", "path": "", "value": {}}]`} {
			want(t, "error: "+message, lines(t, doc, patch))
		}
	}
}

// Each copy has the ones before.
func TestTooManyCopies(t *testing.T) {
	var copies strings.Builder
	for i := range 20 {
		fmt.Fprintf(&copies, "- {op: copy, from: /machine, path: /machine/%d}\n", i)
	}
	want(t, "error: patch: operation 12: copy /machine/11: what is copied is larger than the 1048576 bytes of a configuration", lines(t, document, copies.String()))
}

func TestReplaceEverything(t *testing.T) {
	for _, op := range []string{"add", "replace"} {
		out, err := Apply([]byte(document), []byte(`[{"op": "`+op+`", "path": "", "value": {"version": "v1alpha1", "machine": {"type": "init"}}}]`))
		if err != nil || strings.Contains(string(out), "kitchen\n    interfaces") || !strings.Contains(string(out), "type: init") {
			t.Errorf("%s: %q, %v", op, out, err)
		}
	}
}

// Comments after the last entry stay, at any depth.
func TestCommentsAtTheEnd(t *testing.T) {
	doc := "a:\n  b: 1\n  # c: 2\n# d: 3\n"
	want(t, "-  b: 1\n+  b: 5\n", lines(t, doc, "a: {b: 5}"))
	want(t, "+  e: 5\n", lines(t, doc, "a: {e: 5}"))
	want(t, "+f: 5\n", lines(t, doc, "f: 5"))
}

// Files come from editors of all kinds.
func TestOddTexts(t *testing.T) {
	const patch = "a: {b: 5}"
	for _, tt := range []struct{ doc, want string }{
		{"a:\r\n  b: 1\r\n\r\n  c: 2\r\n", "a:\r\n  b: 5\r\n\r\n  c: 2\r\n"},
		{"---\na:\n  b: 1\n...\n", "---\na:\n  b: 5\n"},
		{"a:\n  b: 1", "a:\n  b: 5\n"},
		{"{a: {b: 1, c: 2}}\n", "{a: {b: 5, c: 2}}\n"},
		{"a: {b: 1, # one\n    c: 2}\nd: 3\n", "a: {b: 5, # one\n  c: 2}\nd: 3\n"},
		{"\"a\":\n   'b': 1\n   c: |2-\n       x\n", "\"a\":\n   'b': 5\n   c: |2-\n       x\n"},
		{"a: &x\n  b: 1\nc: *x\n", "a:\n  b: 5\nc:\n  b: 1\n"},
		{"\ufeffa:\n  b: 1\n", "\ufeffa:\n  b: 5\n"},
		{"a: !!map\n  b: 1\n", "a: !!map\n  b: 5\n"},
		{"? a\n: b: 1\n  c: 2\n", "a:\n  b: 5\n  c: 2\n"},
		{"a:\n  b: >\n    long\n    text\n  c: 1\n", "a:\n  b: 5\n  c: 1\n"},
	} {
		got, err := Apply([]byte(tt.doc), []byte(patch))
		if err != nil {
			t.Errorf("%q: %v", tt.doc, err)
		}
		want(t, tt.want, string(got))
	}
}

func TestApply(t *testing.T) {
	for _, tt := range patches {
		t.Run(tt.name, func(t *testing.T) { want(t, tt.want, lines(t, document, tt.patch)) })
	}
}
