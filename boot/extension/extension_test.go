package extension

import (
	"strings"
	"testing"
	"testing/fstest"
)

const good = "name: agent\nversion: \"1.0\"\ndescription: a test\n"

func TestParse(t *testing.T) {
	t.Parallel()
	m, err := Parse([]byte(good + "service: {command: [/bin/x], mounts: [{source: /dev}]}\n"))
	if err != nil || m.Service.Restart != Always || m.Service.Mounts[0].Destination != "/dev" {
		t.Errorf("%+v, %v", m.Service, err)
	}
	for text, want := range map[string]string{
		"":                 `name ""`,
		good + "nmae: x\n": "line 4: field nmae not found",
		strings.Replace(good, "agent", "../x", 1):                            `name "../x": must have`,
		strings.Replace(good, "a test", "", 1):                               "description: is required",
		good + "files: [usr]\n":                                              `files: "usr" must be an absolute path`,
		good + "files: [/usr/../etc]\n":                                      "must be an absolute path without . and ..",
		good + "service: {}\n":                                               "service.command: is required",
		good + "service: {command: [x]}\n":                                   `service.command: "x" must be`,
		good + "service: {command: [/x], dependsOn: [network]}\n":            `"network" is neither ext-NAME of another extension nor one of balancer, containerd`,
		good + "service: {command: [/x], restart: sometimes}\n":              `service.restart "sometimes": must be always, onFailure or never`,
		good + "service: {command: [/x], defaults: [{path: /etc/passwd}]}\n": "/etc/passwd isn't below /var",
	} {
		if _, err := Parse([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

// One extension that can't be used doesn't keep the others from being used.
func TestOf(t *testing.T) {
	t.Parallel()
	manifest := func(name, more string) *fstest.MapFile {
		return &fstest.MapFile{Data: []byte(strings.Replace(good, "agent", name, 1) + more)}
	}
	service := func(dependsOn string) string {
		return "service: {command: [/x], dependsOn: [" + dependsOn + "]}\n"
	}
	all, err := Of(fstest.MapFS{
		Dir + "/a/extension.yaml":      manifest("a", service("ext-b, networkd")),
		Dir + "/b/extension.yaml":      manifest("b", service("")),
		Dir + "/broken/extension.yaml": manifest("broken", "x: y\n"),
		Dir + "/empty/rootfs/x":        manifest("x", ""),
		Dir + "/other/extension.yaml":  manifest("b", ""),
		Dir + "/lost/extension.yaml":   manifest("lost", service("ext-plain")),
		Dir + "/later/extension.yaml":  manifest("later", service("ext-lost")),
		Dir + "/plain/extension.yaml":  manifest("plain", ""),
	})
	var names []string
	for _, m := range all {
		names = append(names, m.Name)
	}
	if got := strings.Join(names, " "); got != "a b plain" {
		t.Errorf("%s are used", got)
	}
	for _, want := range []string{"/broken/extension.yaml: ", "/empty/extension.yaml: ", `name "b": the directory has another one`, "extension lost: its service depends on ext-plain", "extension later: its service depends on ext-lost"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	if all, err := Of(fstest.MapFS{}); len(all) != 0 || err != nil {
		t.Errorf("%v, %v", all, err)
	}
}
