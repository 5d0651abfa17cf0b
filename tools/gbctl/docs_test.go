package main

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/patch"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

// fence matches the begin of a block of commands in a page. "console hardware" needs what a test hasn't: a machine, a
// medium or a registry of the reader's own.
var fence = regexp.MustCompile("^```(console|sh)( hardware)?$")

// everywhere are programs in blocks that a computer with a checkout runs as they are. docs/releases.md and the two
// pages about a self-hosted control plane have tests of their own for theirs.
var everywhere = []string{"cp", "curl", "export", "git", "go", "grep", "kubectl", "openssl", "sha256sum"}

// A shown command is one of a page.
type shown struct {
	at, line string
	hardware bool
}

// shownIn are the commands in the blocks of a page.
func shownIn(t *testing.T, file string) (all []shown) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var block []string
	inside := false
	text = bytes.ReplaceAll(text, []byte("\\\n"), []byte(" \n"))
	for i, line := range strings.Split(string(text), "\n") {
		line = strings.TrimSpace(line)
		at := fmt.Sprintf("%s:%d", strings.TrimPrefix(file, "../../"), i+1)
		switch begin := fence.FindStringSubmatch(line); {
		case inside && line == "```":
			inside, block = false, nil
		case !inside && begin != nil:
			inside, block = true, begin
		case !inside && strings.HasPrefix(line, "```"):
			inside = true
			if regexp.MustCompile("^```(console|sh|shell|bash)").MatchString(line) {
				t.Errorf("%s: %s: a block of commands is console or sh, perhaps with the word hardware", at, line)
			}
		case block != nil:
			command, prompt := strings.CutPrefix(line, "$ ")
			if (prompt || block[1] == "sh") && command != "" {
				all = append(all, shown{at, command, block[2] != ""})
			}
		}
	}
	return all
}

// pagesWithCommands are all pages of the repository.
func pagesWithCommands(t *testing.T) (all []string) {
	t.Helper()
	err := filepath.WalkDir("../..", func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && slices.Contains([]string{".git", "out", "testdata"}, entry.Name()):
			return fs.SkipDir
		case filepath.Ext(path) == ".md":
			all = append(all, path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

var (
	comment  = regexp.MustCompile(`\s+# .*$`)
	variable = regexp.MustCompile(`^[A-Z_]+=\S*\s+`)
	target   = regexp.MustCompile(`(?m)^([a-z0-9-]+):`)
)

// Each command in the pages can be typed as it is there.
func TestDocuments(t *testing.T) {
	t.Parallel()
	makefile, err := os.ReadFile("../../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	var targets []string
	for _, m := range target.FindAllStringSubmatch(string(makefile), -1) {
		targets = append(targets, m[1])
	}
	run, found := testedCommands(t), 0
	for _, file := range pagesWithCommands(t) {
		for _, c := range shownIn(t, file) {
			for command := range strings.SplitSeq(comment.ReplaceAllString(c.line, ""), " && ") {
				command = variable.ReplaceAllString(command, "")
				program, rest, _ := strings.Cut(command, " ")
				switch {
				case program == "gbctl":
					found++
					tryExample(t, "  "+command)
					if path := pathIn(rest); !c.hardware && !run(path) {
						t.Errorf("%s: no test runs gbctl %s: write one, or mark the block with the word hardware", c.at, path)
					}
				case program == "make":
					for word := range strings.FieldsSeq(rest) {
						if !strings.Contains(word, "=") && !slices.Contains(targets, word) {
							t.Errorf("%s: the Makefile has no target %s", c.at, word)
						}
					}
				case !c.hardware && !slices.Contains(everywhere, program):
					t.Errorf("%s: no test runs %s: mark the block with the word hardware", c.at, program)
				}
			}
		}
	}
	if found < 80 {
		t.Errorf("only %d commands found", found)
	}
}

// pathIn is the command in a command line, without its arguments.
func pathIn(line string) string {
	a := &app{}
	cmd, _, err := a.rootCommand().Find(words(line))
	if err != nil {
		return line
	}
	return pathOf(cmd)
}

// testedCommands tells whether the scripts, the tests of gbctl or the end-to-end tests run a command.
func testedCommands(t *testing.T) func(path string) bool {
	t.Helper()
	var sources bytes.Buffer
	for _, pattern := range []string{"testdata/*.txtar", "*_test.go", "../../qemu/e2e/*/*.go", "../../qemu/e2e/*/testdata/*", "../release/*_test.go"} {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: %v", pattern, err)
		}
		for _, file := range files {
			if text, err := os.ReadFile(file); err == nil { // no directory
				sources.Write(text)
			}
		}
	}
	text := sources.Bytes()
	return func(path string) bool {
		words := strings.Fields(regexp.QuoteMeta(path))
		return regexp.MustCompile(`gbctl[^\n|]*\b`+strings.Join(words, " ")+`\b`).Match(text) || regexp.MustCompile(`"`+strings.Join(words, `(", "| )`)+`\b`).Match(text)
	}
}

// mention is a command of gbctl in the text of a page.
var mention = regexp.MustCompile("`gbctl ([^`\n]+)`")

// Commands that the text of a page names are there, and so are their flags.
func TestCommandsInText(t *testing.T) {
	t.Parallel()
	found, root := 0, (&app{}).rootCommand()
	for _, file := range pagesWithCommands(t) {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range mention.FindAllStringSubmatch(string(text), -1) {
			cmd, args, err := root.Find(words(m[1]))
			if err == nil {
				err = cmd.ParseFlags(args)
			}
			if rest := cmd.Flags().Args(); err == nil && cmd.HasSubCommands() && len(rest) > 0 && strings.ToLower(rest[0]) == rest[0] {
				err = fmt.Errorf("there is no command %s below %s", rest[0], cmd.CommandPath())
			}
			// A flag may be named without its argument.
			if err != nil && !errors.Is(err, pflag.ErrHelp) && !strings.HasPrefix(err.Error(), "flag needs an argument") {
				t.Errorf("%s: gbctl %s: %v", strings.TrimPrefix(file, "../../"), m[1], err)
			}
			found++
		}
	}
	if found < 300 {
		t.Errorf("only %d commands found", found)
	}
}

var (
	yamlBlock = regexp.MustCompile("(?ms)^```yaml\n(.*?)^```$")
	leftOut   = regexp.MustCompile(`[\w.+/]+…`)
)

// Each configuration in the pages is taken by a node as it is there: whole, or as a patch of a generated one.
func TestConfigurationsInDocuments(t *testing.T) {
	t.Parallel()
	secrets, err := config.NewSecrets(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	public, err := pki.EncodePublicKey(secrets.MachineCA.Key)
	if err != nil {
		t.Fatal(err)
	}
	// What a page leaves out of a secret begins as that secret does.
	whole := func(begun []byte) []byte {
		switch text := strings.TrimSuffix(string(begun), "…"); {
		case strings.HasSuffix(text, "."):
			return []byte(text + "0123456789abcdef")
		case !strings.HasPrefix(base64.StdEncoding.EncodeToString(secrets.MachineCA.Crt), text):
			return []byte(base64.StdEncoding.EncodeToString(public))
		}
		return []byte(base64.StdEncoding.EncodeToString(secrets.MachineCA.Crt))
	}
	var bases [][]byte
	for _, typ := range []config.MachineType{config.ControlPlane, config.Worker} {
		c, err := config.Generate(config.Options{Type: typ, ClusterName: "home", Endpoint: "https://10.5.0.2:6443", Secrets: secrets, Now: time.Now()})
		if err != nil {
			t.Fatal(err)
		}
		text, err := c.Encode()
		if err != nil {
			t.Fatal(err)
		}
		bases = append(bases, text)
	}
	found := 0
	for _, file := range pagesWithCommands(t) {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range yamlBlock.FindAllStringSubmatchIndex(string(text), -1) {
			block := leftOut.ReplaceAllFunc(text[m[2]:m[3]], whole)
			var top map[string]any
			if err := yaml.Unmarshal(block, &top); err == nil && top["machine"] == nil && top["cluster"] == nil {
				continue // it isn't one of a node
			}
			found++
			_, _, err := config.Load("", block)
			for i := 0; err != nil && i < len(bases); i++ {
				var patched []byte
				if patched, err = patch.Apply(bases[i], block); err == nil {
					_, _, err = config.Load("", patched)
				}
			}
			if err != nil {
				t.Errorf("%s:%d: %v", strings.TrimPrefix(file, "../../"), bytes.Count(text[:m[2]], []byte("\n")), err)
			}
		}
	}
	if found < 30 {
		t.Errorf("only %d configurations found", found)
	}
}

// curl reads metrics as docs/metrics.md shows it, also through a port of loopback, with the certificate that the
// commands there make: the server demands what the machine API demands.
func TestCurlOfMetrics(t *testing.T) {
	curl, err := exec.LookPath("curl")
	if err != nil {
		t.Skip("curl isn't installed")
	}
	commands := shownIn(t, "../../docs/metrics.md")
	s := newShell(t)
	s.now = time.Now()
	s.run("config home 10.5.0.2")
	secrets, err := config.LoadSecrets("controlplane.yaml", s.read("controlplane.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	ca := secrets.MachineCA.CA()
	crt, key, err := ca.Issue(pki.Leaf{CN: "node", IPs: []netip.Addr{netip.MustParseAddr("10.5.0.2")}, Server: true, Now: time.Now()})
	if err != nil {
		t.Fatal(err)
	}
	pair, err := tls.X509KeyPair(crt, key)
	if err != nil {
		t.Fatal(err)
	}
	clients := x509.NewCertPool()
	clients.AppendCertsFromPEM(ca.Cert)
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "%s for %s\n", r.URL.Path, r.TLS.PeerCertificates[0].Subject.Organization)
	}))
	server.TLS = &tls.Config{Certificates: []tls.Certificate{pair}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: clients, MinVersion: tls.VersionTLS13}
	server.StartTLS()
	defer server.Close()
	if err := os.WriteFile("ca.crt", ca.Cert, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range commands {
		program, args, _ := strings.Cut(c.line, " ")
		if program == "gbctl" {
			s.run(strings.TrimPrefix(args, "gen "))
			continue
		}
		args += " --silent --show-error --connect-to ::" + server.Listener.Addr().String()
		out, err := exec.CommandContext(t.Context(), curl, strings.Fields(args)...).CombinedOutput()
		if err != nil || string(out) != "/metrics for [os:reader]\n" {
			t.Errorf("%s: %v: %s", c.line, err, out)
		}
	}
	if len(commands) != 4 {
		t.Errorf("%d commands, want 4", len(commands))
	}
}

// Without a cluster, make console says what to type.
func TestConsoleWithoutACluster(t *testing.T) {
	t.Parallel()
	out, err := exec.CommandContext(t.Context(), "make", "-C", "../..", "console", "CLUSTER=nosuch", "NODE=worker-1").CombinedOutput()
	if want := "there is no node worker-1 in a cluster nosuch: 'make up CLUSTER=nosuch' starts one\n"; err == nil || !strings.Contains(string(out), want) || strings.Contains(string(out), "tail") {
		t.Errorf("%v: %s", err, out)
	}
}
