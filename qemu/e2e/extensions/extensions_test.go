//go:build e2e

// Package extensions tests the services of extensions on a node.
package extensions

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/image/customize"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

// serviceBudget is for a service to start, or to start again.
const serviceBudget = 20 * time.Second

// program is a static program with two commands: it serves a directory, or copies what a URL has into a file.
const program = `package main

import ("io"; "net/http"; "os")

func main() {
	if os.Args[1] == "serve" {
		http.Handle("/", http.FileServer(http.Dir(os.Args[3])))
		panic(http.ListenAndServe(os.Args[2], nil))
	}
	r, err := http.Get(os.Args[2])
	if err != nil { panic(err) }
	text, err := io.ReadAll(r.Body)
	if err != nil { panic(err) }
	if err := os.WriteFile(os.Args[3], text, 0o600); err != nil { panic(err) }
	if err := os.WriteFile("/written", nil, 0o600); err == nil { panic("the root file system is writable") }
}
`

// extensionOf writes an extension with the program.
func extensionOf(t *testing.T, built, name, service string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), name)
	e2etest.WriteFile(t, filepath.Join(dir, "extension.yaml"), fmt.Appendf(nil, "name: %s\nversion: \"1\"\ndescription: a test\nservice:\n%s", name, service))
	content, err := os.ReadFile(built)
	if err != nil {
		t.Fatal(err)
	}
	to := filepath.Join(dir, "rootfs", "usr/bin/program")
	e2etest.WriteFile(t, to, content)
	if err := os.Chmod(to, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

// Services of extensions are part of a node's graph: one serves a file with the node's name, another one, which depends
// on it, copies that and ends, and one whose device isn't there waits, and says for what.
func TestExtensionsInContainer(t *testing.T) {
	source, built := filepath.Join(t.TempDir(), "main.go"), filepath.Join(t.TempDir(), "program")
	e2etest.WriteFile(t, source, []byte(program))
	build := exec.Command("go", "build", "-o", built, source)
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	change := customize.Change{Extensions: []string{
		extensionOf(t, built, "server", `  command: [/usr/bin/program, serve, "127.0.0.1:8099", /data]
  mounts: [{source: /var/lib/server, destination: /data, readOnly: true}]
  defaults: [{path: /var/lib/server/name, content: "${hostname} ${machineID}\n"}]
`),
		extensionOf(t, built, "copier", `  command: [/usr/bin/program, copy, "http://127.0.0.1:8099/name", /data/copy]
  dependsOn: [ext-server]
  restart: onFailure
  mounts: [{source: /var/lib/copier, destination: /data}]
`),
		extensionOf(t, built, "waiting", "  command: [/usr/bin/program]\n  waitFor: [/dev/nothing]\n"),
	}}
	c, m := e2etest.Ready(t, "extensions", qemu.Container, e2etest.Customized(t, change))
	m.Reached("the node is Ready")
	is := func(service string, wants ...string) {
		t.Helper()
		c.Eventually(serviceBudget, service+": "+strings.Join(wants, ", "), func() error {
			out, err := c.TryGbctl("-n", c.Node(), "service", service)
			for _, want := range wants {
				if err == nil && !strings.Contains(out, want) {
					err = errors.New(out)
				}
			}
			return err
		})
	}
	is("ext-server", "Running", "Started task ext-server")
	is("ext-copier", "Finished")
	is("ext-waiting", "Waiting", `file "/dev/nothing" to exist`)
	id := strings.TrimSpace(c.Gbctl("-n", c.Node(), "read", "/etc/machine-id"))
	if got, want := c.Gbctl("-n", c.Node(), "read", "/var/lib/copier/copy"), c.Nodes[0].Name+" "+id+"\n"; got != want {
		t.Errorf("the copy is %q, want %q", got, want)
	}
	if got := c.Gbctl("-n", c.Node(), "get", "extensions"); strings.Count(got, "\n") != 4 || !e2etest.Row(got, "waiting", "ext-waiting") {
		t.Errorf("extensions:\n%s", got)
	}
	if got := c.Gbctl("-n", c.Node(), "image", "provenance"); !strings.Contains(got, `"name": "extension server"`) {
		t.Errorf("provenance:\n%s", got)
	}

	c.Gbctl("-n", c.Node(), "service", "ext-server", "restart")
	is("ext-server", "Running", "Stopped")
	c.Gbctl("-n", c.Node(), "service", "ext-server", "stop")
	is("ext-server", "Finished")
	c.Gbctl("-n", c.Node(), "service", "ext-server", "start")
	is("ext-server", "Running")
}
