package main

import (
	"io"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// leaves are all commands that do something.
func leaves(root *cobra.Command) (all []*cobra.Command) {
	for _, c := range root.Commands() {
		if c.Runnable() && c.Name() != "help" && c.Parent().Name() != "completion" {
			all = append(all, c)
		}
		all = append(all, leaves(c)...)
	}
	return all
}

// withoutFormats are the commands that have no -o, by what they print.
var withoutFormats = map[string][]string{
	"nothing: they are groups": {"cluster", "cluster debug", "config", "edit", "etcd", "etcd alarm", "gen", "image", "inspect", "media", "operation", "recovery-key", "token"},
	"what they do": {
		"bootstrap", "cluster create", "cluster debug clock", "cluster debug cut", "cluster debug endpoint", "cluster debug freeze", "cluster debug network",
		"cluster debug nmi", "cluster debug off", "cluster debug on", "cluster debug thaw", "cluster destroy", "cluster host", "cluster load", "config add", "config confirm",
		"config merge", "config renew", "config use-context", "convert-k8s", "encrypt", "etcd defrag", "etcd forfeit-leadership", "etcd leave", "etcd remove-member",
		"images pull", "images push", "images rm", "images serve", "install", "media serve", "operation abort", "operation answer", "operation take-over",
		"readdress", "reboot", "recovery-key remove", "reset", "rollback", "rotate-ca", "set-endpoint", "shutdown", "time set", "token revoke", "unlock", "upgrade", "upgrade-k8s", "validate",
	},
	"that they wrote files": {
		"copy", "etcd snapshot", "gen ca", "gen config", "gen crt", "gen csr", "gen key", "gen release-key", "gen secrets", "gen secureboot", "image build", "images bundle",
		"man", "media build", "pcap", "support",
	},
	"a format of their own": {
		"attest", "boot-chart", "config show", "dashboard", "image provenance", "inspect graph", "kubeconfig", "metrics", "read", "recovery-key add", "schema", "token create",
	},
}

// Each command that prints facts prints them for programs, too.
func TestFactsHaveFormats(t *testing.T) {
	t.Parallel()
	var without []string
	for _, paths := range withoutFormats {
		without = append(without, paths...)
	}
	for _, cmd := range leaves((&app{out: io.Discard, err: io.Discard}).rootCommand()) {
		path := strings.TrimPrefix(cmd.CommandPath(), "gbctl ")
		f := cmd.Flags().Lookup("output")
		formats := false
		if f != nil && !f.Hidden {
			c, ok := f.Value.(choice)
			formats = ok && f.Shorthand == "o" && slices.Contains(c.of, "json")
		}
		if formats == slices.Contains(without, path) {
			t.Errorf("%s: -o for formats: %t", path, formats)
		}
	}
}

// A flag means the same in all commands that have it. -f follows where there is something to follow, and is a file
// elsewhere.
func TestFlagsHaveOneMeaning(t *testing.T) {
	t.Parallel()
	meant := map[string]string{"-f": "config file follow", "-l": "listening long"}
	types := map[string]string{}
	for _, cmd := range leaves((&app{out: io.Discard, err: io.Discard}).rootCommand()) {
		cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
			short := "-" + f.Shorthand
			// a number or numbers, a file or files, a patch or patches
			if f.Hidden || slices.Contains([]string{"boot", "config", "patch", "tail"}, f.Name) {
				return
			}
			if f.Shorthand != "" && meant[short] == "" {
				meant[short] = f.Name
			}
			if f.Shorthand != "" && !slices.Contains(strings.Fields(meant[short]), f.Name) {
				t.Errorf("%s: %s is --%s, and elsewhere --%s", cmd.CommandPath(), short, f.Name, meant[short])
			}
			if of, ok := types[f.Name]; ok && of != f.Value.Type() {
				t.Errorf("%s: --%s is a %s, and elsewhere a %s", cmd.CommandPath(), f.Name, f.Value.Type(), of)
			}
			types[f.Name] = f.Value.Type()
		})
	}
	if types["wait"] != "duration" || types["output-file"] != "string" {
		t.Errorf("%v", types)
	}
}

// Each flag for one of several words completes them, and refuses others.
func TestChoices(t *testing.T) {
	t.Parallel()
	found := 0
	for _, cmd := range leaves((&app{out: io.Discard, err: io.Discard}).rootCommand()) {
		cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
			c, ok := f.Value.(choice)
			if !ok {
				return
			}
			found++
			complete, ok := cmd.GetFlagCompletionFunc(f.Name)
			if !ok {
				t.Fatalf("%s --%s completes nothing", cmd.CommandPath(), f.Name)
			}
			if words, _ := complete(cmd, nil, ""); !slices.Equal(words, c.of) || f.DefValue != c.of[0] {
				t.Errorf("%s --%s completes %q", cmd.CommandPath(), f.Name, words)
			}
			if err := f.Value.Set("nonsense"); err == nil || f.Value.String() != f.DefValue {
				t.Errorf("%s --%s nonsense: %v", cmd.CommandPath(), f.Name, err)
			}
		})
	}
	if found < 40 {
		t.Errorf("only %d flags", found)
	}
}

var inQuotes = regexp.MustCompile(`'gbctl ([^']+)'`)

// What habits lead to is there, and what they take the place of isn't.
func TestHabits(t *testing.T) {
	t.Parallel()
	h, root := readHabits(), (&app{out: io.Discard, err: io.Discard}).rootCommand()
	m, err := replay[apiv1.ListDefinitionsResponse]("ResourceService/Definitions", &apiv1.ListDefinitionsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	is := func(line string) bool {
		cmd, rest, err := root.Find(strings.Fields(line))
		return err == nil && cmd != root && (len(rest) == 0 || !cmd.HasSubCommands())
	}
	targets := slices.Collect(maps.Values(h.Commands))
	for _, sentence := range h.Sentences {
		for _, found := range inQuotes.FindAllStringSubmatch(sentence, -1) {
			targets = append(targets, strings.TrimPrefix(found[1], "-n ADDRESS "))
		}
	}
	for _, target := range targets {
		if !is(target) {
			t.Errorf("there is no command gbctl %s", target)
		}
	}
	for _, key := range slices.Concat(slices.Collect(maps.Keys(h.Commands)), slices.Collect(maps.Keys(h.Sentences))) {
		kind, get := strings.CutPrefix(key, "get ")
		if get && slices.ContainsFunc(m.Msg.Definitions, func(d *apiv1.ResourceDefinition) bool { return called(d, kind) }) || !get && is(key) {
			t.Errorf("%s is there", key)
		}
	}
	for flag, right := range h.Flags {
		if strings.HasPrefix(right, "-") && !slices.ContainsFunc(leaves(root), func(c *cobra.Command) bool {
			name, _, _ := strings.Cut(right[2:], "=")
			return name == "help" || name == "version" || c.Flags().Lookup(name) != nil || c.InheritedFlags().Lookup(name) != nil
		}) {
			t.Errorf("%s: there is no flag %s", flag, right)
		}
	}
}
