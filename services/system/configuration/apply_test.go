package configuration

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/source"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
)

// power is a node that boots again and again on one STATE.
type power struct {
	t   *testing.T
	dir string

	*Applier
	store    *resource.Store
	mu       sync.Mutex // guards restarts and reboots
	restarts []string
	reboots  []string
	lacks    error // what Restart returns
	off      func()
}

// on boots: the configuration comes from STATE, or else from the medium.
func (p *power) on(medium []byte) {
	p.t.Helper()
	p.store, p.restarts, p.reboots = resource.NewStore(), nil, nil
	p.Applier = NewApplier(ApplierOptions{
		Store: p.store, StateDir: p.dir, Log: slog.New(slog.DiscardHandler),
		Restart: func(_ context.Context, id string, late bool) error {
			p.mu.Lock()
			defer p.mu.Unlock()
			if late {
				id += " late"
			}
			p.restarts = append(p.restarts, id)
			return p.lacks
		},
		Reboot: func(why string) {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.reboots = append(p.reboots, why)
		},
	})
	if err := p.stateFound(); err != nil {
		p.t.Fatal(err)
	}
	source := source.State
	text, err := p.stored.read("config.yaml")
	if err != nil {
		p.t.Fatal(err)
	}
	if text == nil {
		source, text = "medium", medium
	}
	if text != nil {
		if err := p.begin(source, text); err != nil {
			p.t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { p.run(ctx) })
	p.off = func() { cancel(); running.Wait() }
}

// reboot is what follows from a reboot that was asked for, or a power cut.
func (p *power) again() {
	p.t.Helper()
	p.off()
	p.on(nil)
}

func (p *power) restarted() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.restarts)
}

func (p *power) rebooted() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.reboots)
}

func (p *power) hostname() string {
	p.t.Helper()
	c, err := Config(p.store)
	if err != nil {
		p.t.Fatal(err)
	}
	return c.Machine.Network.Hostname
}

func (p *power) onDisk() string {
	p.t.Helper()
	data, err := os.ReadFile(filepath.Join(p.dir, "config.yaml"))
	if err != nil {
		p.t.Fatal(err)
	}
	return string(data)
}

// with is a document with another host name, and a comment that must stay.
func with(base []byte, hostname string) []byte {
	return append([]byte("# by hand: "+hostname+"\n"), bytes.Replace(base, []byte("  install:\n"), []byte("  network:\n    hostname: "+hostname+"\n  install:\n"), 1)...)
}

// withType changes a field that takes a reboot.
func withType(text []byte) []byte {
	return bytes.Replace(text, []byte("type: init"), []byte("type: controlplane"), 1)
}

// start is a node with a configuration named one, in a bubble of its own time.
func start(t *testing.T, do func(p *power, base []byte)) {
	t.Helper()
	base := document(t)
	synctest.Test(t, func(t *testing.T) {
		p := &power{t: t, dir: t.TempDir()}
		p.on(with(base, "one"))
		defer func() { p.off() }()
		do(p, base)
	})
}

func (p *power) must(r Request) Result {
	p.t.Helper()
	r.By = "tester"
	res, err := p.Apply(p.t.Context(), r)
	if err != nil {
		p.t.Fatal(err)
	}
	synctest.Wait()
	return res
}

// S-068: a machine takes the configuration of encrypted partitions, and a node in a container says that they have no
// effect there.
func TestS068EncryptionIsTaken(t *testing.T) {
	start(t, func(p *power, base []byte) {
		encrypted := bytes.Replace(base, []byte("  install:\n"), []byte("  systemDiskEncryption: {state: {keys: [{nodeID: {}, slot: 0}]}}\n  install:\n"), 1)
		if res, err := p.Apply(t.Context(), Request{Text: encrypted, DryRun: true}); err != nil || res.Mode != Reboot || len(res.Warnings) > 0 {
			t.Errorf("on a machine: %+v, %v", res, err)
		}
		var log bytes.Buffer
		container := NewApplier(ApplierOptions{Mode: boot.Container, Store: resource.NewStore(), StateDir: t.TempDir(), Log: slog.New(slog.NewTextHandler(&log, nil))})
		if err := container.begin("seed", encrypted); err != nil || !strings.Contains(log.String(), "machine.systemDiskEncryption.state: has no effect in a container") {
			t.Errorf("in a container: %v, log %s", err, log.String())
		}
	})
}

// S-021, S-022, S-039, Q-10: the mildest mode that works, at once, and on STATE as it was written.
func TestS021ApplyLive(t *testing.T) {
	start(t, func(p *power, base []byte) {
		two := with(base, "two")
		dry := p.must(Request{Text: two, DryRun: true})
		if p.hostname() != "one" || len(dry.Changes) != 1 || dry.Changes[0].Path != "machine.network.hostname" || dry.Mode != Immediate {
			t.Errorf("dry run: %+v, hostname %s", dry, p.hostname())
		}
		res := p.must(Request{Text: two, Mode: Auto})
		if p.hostname() != "two" || p.onDisk() != string(two) || res.Mode != Immediate || res.Version != 2 || res.Rebooting {
			t.Errorf("applied: %+v", res)
		}
		if want := []string{"kubelet"}; !slices.Equal(p.restarted(), want) || !slices.Equal(res.Restarted, want) {
			t.Errorf("restarted %q, said %q, want %q", p.restarted(), res.Restarted, want)
		}
		p.again()
		if p.hostname() != "two" {
			t.Errorf("after a reboot: %s", p.hostname())
		}
	})
}

// A service that goes on because it would lack something is restarted once it doesn't.
func TestRestartIsTriedAgain(t *testing.T) {
	start(t, func(p *power, base []byte) {
		lack := func(err error) {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.lacks = err
		}
		lack(errors.New("image x is being pulled"))
		p.must(Request{Text: with(base, "two"), Mode: Auto})
		time.Sleep(2*restartAgain + restartAgain/2)
		synctest.Wait()
		lack(nil)
		time.Sleep(5 * restartAgain)
		synctest.Wait()
		if want := []string{"kubelet", "kubelet late", "kubelet late", "kubelet late"}; !slices.Equal(p.restarted(), want) {
			t.Errorf("restarted %q, want %q", p.restarted(), want)
		}
	})
}

// S-033: immediate refuses what takes a reboot, and says which fields.
func TestS033ImmediateRefusesReboot(t *testing.T) {
	start(t, func(p *power, base []byte) {
		_, err := p.Apply(t.Context(), Request{Text: withType(with(base, "two")), Mode: Immediate})
		var needs *NeedsReboot
		if !errors.As(err, &needs) || !slices.Equal(needs.Paths, []string{"machine.type"}) {
			t.Errorf("error %v", err)
		}
		if p.hostname() != "one" || strings.Contains(p.onDisk(), "hostname: two") {
			t.Error("a refused configuration was applied")
		}
	})
}

// A live change that takes the node's last way away is refused, and can be tried or forced.
func TestLastWayIsOnlyTriedAway(t *testing.T) {
	start(t, func(p *power, base []byte) {
		p.o.HasWay = func(n config.Network) bool { return n.Hostname != "lost" }
		lost := with(base, "lost")
		for _, mode := range []Mode{Auto, Immediate} {
			if _, err := p.Apply(t.Context(), Request{Text: lost, Mode: mode}); !errors.Is(err, ErrNoWay) || p.hostname() != "one" || strings.Contains(p.onDisk(), "hostname: lost") {
				t.Errorf("mode %s: %v", mode, err)
			}
		}
		p.must(Request{Text: with(base, "two")})
		if p.must(Request{Text: lost, Force: true}); p.hostname() != "lost" {
			t.Errorf("forced: %s", p.hostname())
		}
		p.must(Request{Text: with(base, "two")})
		if res := p.must(Request{Text: lost, Mode: Try}); p.hostname() != "lost" || res.Deadline.IsZero() {
			t.Errorf("tried: %+v", res)
		}
		time.Sleep(DefaultTryTimeout + time.Second)
		synctest.Wait()
		if p.hostname() != "two" {
			t.Errorf("after the trial: %s", p.hostname())
		}
	})
}

// S-032: a change that takes a reboot has one, and counts before it.
func TestS032Reboot(t *testing.T) {
	start(t, func(p *power, base []byte) {
		res := p.must(Request{Text: withType(with(base, "two")), Mode: Auto})
		if res.Mode != Reboot || !res.Rebooting || len(p.rebooted()) != 1 || p.hostname() != "one" {
			t.Errorf("%+v, reboots %q, hostname %s", res, p.rebooted(), p.hostname())
		}
		if _, err := p.Apply(t.Context(), Request{Text: with(base, "three")}); !errors.Is(err, ErrBusy) {
			t.Errorf("applied on the way out: %v", err)
		}
		p.again()
		if p.hostname() != "two" {
			t.Errorf("after the reboot: %s", p.hostname())
		}
	})
}

// S-034, S-035: staged is not current, until the next boot.
func TestS034OnReboot(t *testing.T) {
	start(t, func(p *power, base []byte) {
		res := p.must(Request{Text: with(base, "two"), Mode: OnReboot})
		text, err := p.Text(0)
		if err != nil || !strings.Contains(string(text), "hostname: one") || p.hostname() != "one" || res.Rebooting || !p.Situation().Staged {
			t.Errorf("staged: %+v, current %s, %v", res, text, err)
		}
		p.again()
		if p.hostname() != "two" || p.Situation().Staged {
			t.Errorf("after the reboot: %s, still staged %v", p.hostname(), p.Situation().Staged)
		}
		// A newer one wins over what was staged before it.
		p.must(Request{Text: with(base, "three"), Mode: OnReboot})
		if res := p.must(Request{Text: with(base, "four")}); !strings.Contains(fmt.Sprint(res.Warnings), "dropped") {
			t.Errorf("warnings %v", res.Warnings)
		}
		p.again()
		if p.hostname() != "four" {
			t.Errorf("a staged configuration replaced a newer one: %s", p.hostname())
		}
		// So does the current one, applied again.
		p.must(Request{Text: with(base, "five"), Mode: OnReboot})
		p.must(Request{Text: with(base, "four")})
		p.again()
		if p.hostname() != "four" {
			t.Errorf("a staged configuration replaced the current one, which was applied later: %s", p.hostname())
		}
	})
}

// Whoever changes the network hears the answer before it changes.
func TestNetworkChangesAfterTheAnswer(t *testing.T) {
	start(t, func(p *power, base []byte) {
		two := bytes.Replace(with(base, "two"), []byte("    hostname: two\n"), []byte("    hostname: two\n    interfaces: [{interface: eth0, cidr: 10.5.0.9/24}]\n"), 1)
		p.must(Request{Text: two})
		if p.hostname() != "one" || len(p.restarted()) != 0 || p.onDisk() != string(two) {
			t.Errorf("at once: %s, restarts %q", p.hostname(), p.restarted())
		}
		time.Sleep(2 * answerGrace)
		synctest.Wait()
		if p.hostname() != "two" || len(p.restarted()) != 1 {
			t.Errorf("afterwards: %s, restarts %q", p.hostname(), p.restarted())
		}
		// What comes in between isn't held up by it, nor lost.
		p.must(Request{Text: with(base, "three")})
		p.must(Request{Text: withType(with(base, "three")), DryRun: true})
		time.Sleep(2 * answerGrace)
		synctest.Wait()
		if p.hostname() != "three" {
			t.Errorf("in the end: %s", p.hostname())
		}
	})
}

// Who asks others first gets the plan, and the document is looked at once.
func TestApplyAroundAPlan(t *testing.T) {
	start(t, func(p *power, base []byte) {
		looked := 0
		p.o.Unable = func(*config.Config) string { looked++; return "" }
		refused := errors.New("the cluster would lose its quorum")
		r := Request{Text: with(base, "two"), By: "tester", Around: func(plan Result, _ func() (Result, error)) (Result, error) {
			if len(plan.Changes) != 1 || plan.Mode != Immediate || plan.Version != 0 {
				t.Errorf("the plan is %+v", plan)
			}
			return Result{}, refused
		}}
		if _, err := p.Apply(t.Context(), r); !errors.Is(err, refused) || p.hostname() != "one" {
			t.Errorf("refused: %s, %v", p.hostname(), err)
		}
		r.Around = func(_ Result, do func() (Result, error)) (Result, error) { return do() }
		if res, err := p.Apply(t.Context(), r); err != nil || res.Version != 2 || p.hostname() != "two" {
			t.Errorf("done: %s, %+v, %v", p.hostname(), res, err)
		}
		if looked != 2 {
			t.Errorf("two documents were looked at %d times", looked)
		}
		r.Text = []byte("machine")
		if _, err := p.Apply(t.Context(), r); !errors.As(err, new(config.Problems)) {
			t.Errorf("no configuration: %v", err)
		}
	})
}

// The last ten stay, and any of them can come back (S-040).
func TestS040HistoryAndRollback(t *testing.T) {
	start(t, func(p *power, base []byte) {
		for i := range 14 {
			p.must(Request{Text: with(base, fmt.Sprintf("n%d", i))})
		}
		history, err := p.History()
		if err != nil || len(history) != historySize || history[0].Version != 15 || !history[0].Current || history[1].Current {
			t.Fatalf("%d entries, %+v, %v", len(history), history, err)
		}
		if history[0].By != "tester" || history[0].Summary != "machine.network.hostname" {
			t.Errorf("the newest is %+v", history[0])
		}
		if _, err := p.Rollback(t.Context(), 0, Request{By: "tester"}); err != nil || p.hostname() != "n12" {
			t.Errorf("back by one: %s, %v", p.hostname(), err)
		}
		if _, err := p.Rollback(t.Context(), 8, Request{By: "tester"}); err != nil || p.hostname() != "n6" {
			t.Errorf("back to version 8: %s, %v", p.hostname(), err)
		}
		if _, err := p.Rollback(t.Context(), 3, Request{}); err == nil || !strings.Contains(err.Error(), "version 3 isn't in the history") {
			t.Errorf("back to a forgotten one: %v", err)
		}
	})
}

func TestApplyRefuses(t *testing.T) {
	start(t, func(p *power, base []byte) {
		var problems config.Problems
		if _, err := p.Apply(t.Context(), Request{Text: []byte("machine: {typ: init}")}); !errors.As(err, &problems) {
			t.Errorf("a broken document: %v", err)
		}
		if _, err := p.Apply(t.Context(), Request{Text: with(base, "two"), Base: Digest([]byte("another"))}); !errors.Is(err, ErrStale) {
			t.Errorf("made from another document: %v", err)
		}
		if _, err := p.Apply(t.Context(), Request{Text: with(base, "two"), Base: Digest(p.text), DryRun: true}); err != nil {
			t.Errorf("made from this document: %v", err)
		}
		// A manifest that can't be read is refused, unless it was there before: then it is no reason to refuse anything
		// else.
		bad := append(slices.Clone(base), "\n  inlineManifests:\n    - {name: mine, contents: '{kind: ConfigMap}'}\n"...)
		if _, err := p.Apply(t.Context(), Request{Text: bad}); !errors.As(err, &problems) || !strings.Contains(err.Error(), `manifest "mine": line 1: ConfigMap: apiVersion is missing`) {
			t.Errorf("a bad manifest: %v", err)
		}
		before := p.onDisk()
		if err := os.WriteFile(filepath.Join(p.dir, "config.yaml"), bad, 0o600); err != nil {
			t.Fatal(err)
		}
		p.again()
		if _, err := p.Apply(t.Context(), Request{Text: with(bad, "two"), DryRun: true}); err != nil || !bytes.Equal(p.text, bad) {
			t.Errorf("a node that has it doesn't run as before: %v", err)
		}
		p.must(Request{Text: []byte(before)})
		if _, err := p.Apply(t.Context(), Request{Text: with(base, "two"), Mode: "soon"}); err == nil {
			t.Error("there is a mode soon")
		}
		no := bytes.Replace(with(base, "two"), []byte("persist: true"), []byte("persist: false"), 1)
		if _, err := p.Apply(t.Context(), Request{Text: no, Mode: OnReboot}); err == nil || !strings.Contains(err.Error(), "persist") {
			t.Errorf("staged without being kept: %v", err)
		}
		// S-021: a configuration that isn't persisted is gone with the next boot.
		p.must(Request{Text: no})
		if _, err := os.Stat(filepath.Join(p.dir, "config.yaml")); !os.IsNotExist(err) || p.hostname() != "two" {
			t.Errorf("persist: false: %v, %s", err, p.hostname())
		}
	})
}

// S-015: a node without a configuration takes its first one.
func TestS015FirstConfiguration(t *testing.T) {
	base := document(t)
	synctest.Test(t, func(t *testing.T) {
		p := &power{t: t, dir: t.TempDir()}
		p.on(nil)
		defer func() { p.off() }()
		for _, mode := range []Mode{Try, OnReboot} {
			if _, err := p.Apply(t.Context(), Request{Text: with(base, "one"), Mode: mode}); !errors.Is(err, ErrNoConfig) {
				t.Errorf("mode %s: %v", mode, err)
			}
		}
		p.must(Request{Text: with(base, "one")})
		select {
		case <-p.given:
		default:
			t.Error("machined isn't told")
		}
		if stage, err := Stages.Get(p.store, StageID); err == nil && stage.Spec == Configured {
			t.Error("the network changes before the answer is out")
		}
		time.Sleep(answerGrace + time.Millisecond)
		synctest.Wait()
		stage, err := Stages.Get(p.store, StageID)
		if err != nil || stage.Spec != Configured || p.hostname() != "one" || p.onDisk() != string(with(base, "one")) {
			t.Errorf("stage %v, %v, hostname %s", stage.Spec, err, p.hostname())
		}
	})
}

// A power cut within a write leaves a temporary file, and one between two writes
// a journal without its change: the next boot knows both.
func TestBootAfterInterruptedWrites(t *testing.T) {
	start(t, func(p *power, base []byte) {
		p.off()
		left := filepath.Join(p.dir, ".config.yaml.123")
		if err := os.WriteFile(left, []byte("machine:"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := p.stored.write(tryFile, trial{Previous: with(base, "zero"), Tried: Digest(with(base, "two")), Timeout: time.Minute}); err != nil {
			t.Fatal(err)
		}
		p.on(nil)
		if _, err := os.Stat(left); !os.IsNotExist(err) {
			t.Errorf("a half-written file is still there: %v", err)
		}
		if p.hostname() != "one" || p.Situation().Try != (time.Time{}) {
			t.Errorf("hostname %s", p.hostname())
		}
		if err := boot.WriteFile(filepath.Join(p.dir, tryFile), []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
		p.again()
		if p.hostname() != "one" {
			t.Errorf("with a broken journal: %s", p.hostname())
		}
	})
}

// What can't be kept doesn't keep a node from its configuration: without one it would
// have no API.
func TestBootWithAHistoryThatCannotBeRead(t *testing.T) {
	start(t, func(p *power, _ []byte) {
		p.off()
		if err := os.MkdirAll(filepath.Join(p.dir, historyDir, "000000000009.json"), 0o700); err != nil {
			t.Fatal(err)
		}
		p.on(nil)
		if _, err := Configs.Get(p.store, ConfigID); err != nil || p.hostname() != "one" {
			t.Errorf("it has no configuration: %v", err)
		}
	})
}
