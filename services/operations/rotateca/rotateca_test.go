package rotateca

import (
	"bytes"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/operations/operationtest"
)

// whole is all that a rotation changes, in its order.
func whole() (all []string) {
	for _, phase := range []string{"accept", "issue", "kubelets"} {
		for _, n := range []string{"n1", "n2", "n3", "w1"} {
			all = append(all, n+" "+phase)
		}
	}
	return append(all, "n2 drop", "n3 drop", "w1 drop", "n1 drop", "n1 join", "n2 join", "n3 join", "token ended", "authentication")
}

// rotated checks that all nodes have new authorities, the same, and nothing else.
func (r *rig) rotated(before *config.Config) {
	r.T.Helper()
	first := r.nodes[0].config
	for _, m := range r.nodes {
		for _, a := range config.Authorities {
			if m.name[0] == 'w' && !a.Workers {
				continue
			}
			old, _ := a.Of(before)
			mine, accepts := a.Of(m.config)
			if now, _ := a.Of(first); len(*accepts) > 0 || bytes.Equal(mine.Crt, old.Crt) || !bytes.Equal(mine.Crt, now.Crt) {
				r.T.Errorf("node %s has %d accepted ones beside the %s authority, old: %v, of n1: %v", m.name, len(*accepts), a.Name, bytes.Equal(mine.Crt, old.Crt), bytes.Equal(mine.Crt, now.Crt))
			}
			if worker := m.name[0] == 'w'; worker != (len(mine.Key) == 0) {
				r.T.Errorf("node %s has a key of the %s authority: %v", m.name, a.Name, !worker)
			}
		}
		key := m.config.Cluster.ServiceAccount
		if m.name[0] == 'n' && (len(key.AcceptedKeys) > 0 || bytes.Equal(key.Key, before.Cluster.ServiceAccount.Key) || !bytes.Equal(key.Key, first.Cluster.ServiceAccount.Key)) {
			r.T.Errorf("node %s has another key of service accounts", m.name)
		}
		r.sealedWith(m, first.Cluster.Secret)
	}
	for _, token := range []func(*config.Config) config.Secret{func(c *config.Config) config.Secret { return c.Cluster.Token }, func(c *config.Config) config.Secret { return c.Machine.Token }} {
		for _, m := range r.nodes {
			if now := token(m.config); (now == token(before)) != (m.name[0] == 'w') || m.name[0] == 'n' && now != token(first) {
				r.T.Errorf("node %s has the token %s, and before %s", m.name, now, token(before))
			}
		}
	}
	if first.Cluster.Secret == before.Cluster.Secret || !strings.HasPrefix(string(before.Cluster.Token), r.ended+".") {
		r.T.Errorf("the key of Secrets is the old one: %v; the token that has ended is %s", first.Cluster.Secret == before.Cluster.Secret, r.ended)
	}
}

// unchanged checks that all nodes have what they had.
func (r *rig) unchanged(before *config.Config) {
	r.T.Helper()
	for _, m := range r.nodes {
		for _, a := range config.Authorities {
			old, _ := a.Of(before)
			if now, accepts := a.Of(m.config); len(now.Crt) > 0 && (len(*accepts) > 0 || !bytes.Equal(now.Crt, old.Crt)) {
				r.T.Errorf("node %s has another %s authority, or %d accepted ones", m.name, a.Name, len(*accepts))
			}
		}
		if key := m.config.Cluster.ServiceAccount; m.name[0] == 'n' && (len(key.AcceptedKeys) > 0 || !bytes.Equal(key.Key, before.Cluster.ServiceAccount.Key)) {
			r.T.Errorf("node %s has another key of service accounts", m.name)
		}
		r.sealedWith(m, before.Cluster.Secret)
		if m.config.Cluster.Token != before.Cluster.Token || m.config.Machine.Token != before.Machine.Token || r.ended != "" {
			r.T.Errorf("node %s has other tokens, or %q has ended", m.name, r.ended)
		}
	}
}

// noKeys checks that no record has a private key.
func (r *rig) noKeys() {
	r.T.Helper()
	var keys []string
	for _, m := range r.nodes {
		c := m.config
		for _, secret := range append([]config.Secret{c.Cluster.Secret, c.Cluster.Token, c.Machine.Token}, c.Cluster.AcceptedSecrets...) {
			if len(secret) > 0 {
				keys = append(keys, string(secret))
			}
		}
		for _, a := range config.Authorities {
			issuing, accepts := a.Of(m.config)
			for _, k := range append([]config.CertKey{*issuing}, *accepts...) {
				if len(k.Key) > 0 {
					keys = append(keys, encode(k.Key)[100:140])
				}
			}
		}
	}
	err := filepath.Walk(r.Dir, func(path string, info os.FileInfo, err error) error {
		if err != nil || info.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		for _, key := range keys {
			if bytes.Contains(text, []byte(key)) {
				r.T.Errorf("%s has a private key", path)
			}
		}
		return err
	})
	operationtest.Put(r.T, err)
}

func (r *rig) expect(want []string) {
	r.T.Helper()
	r.Mu.Lock()
	defer r.Mu.Unlock()
	if diff := cmp.Diff(want, r.Did); diff != "" {
		r.T.Errorf("what was changed (-want +got):\n%s", diff)
	}
}

// All authorities are replaced on one node after another. Old credentials are accepted until
// the question, and refused afterwards.
func TestEverythingIsRotated(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.boot()
		defer func() { r.Off() }()
		before := r.nodes[0].config
		o, err := r.start()
		operationtest.Put(t, err)
		for o.Question == nil {
			time.Sleep(time.Second)
			if o, err = r.Runner.Get(o.ID); err != nil || !o.Ended.IsZero() {
				t.Fatalf("it ended as %s: %s, %v", o.State, o.Error, err)
			}
		}
		r.noKeys()
		old := func(n *member) (accepted []string) {
			for _, a := range config.Authorities {
				former, _ := a.Of(before)
				if (n.name[0] == 'n' || a.Workers) && r.handshake(a, n.address, *former) == nil {
					accepted = append(accepted, a.Name)
				}
			}
			return accepted
		}
		for _, n := range r.nodes {
			if got, want := len(old(n)), map[byte]int{'n': 4, 'w': 2}[n.name[0]]; got != want {
				t.Errorf("before the answer, node %s accepts %d old authorities, and not %d", n.name, got, want)
			}
		}
		if o = r.end(o.ID, "yes"); o.State != operation.Done {
			t.Fatalf("it ended as %s: %s", o.State, o.Error)
		}
		r.expect(whole())
		r.rotated(before)
		for _, n := range r.nodes {
			if got := old(n); len(got) > 0 {
				t.Errorf("afterwards node %s accepts old certificates of %v", n.name, got)
			}
		}
		for key, text := range r.authentication {
			if strings.Contains(fmt.Sprint(text), strings.TrimSpace(string(before.Cluster.CA.Crt))) || strings.Contains(fmt.Sprint(text), strings.TrimSpace(string(before.Cluster.AggregatorCA.Crt))) {
				t.Errorf("extension API servers still accept the old authority: %s", key)
			}
		}
	})
}

// The coordinator loses its power at each change, and the operation goes on with the same
// authorities. What it does to n3 is what it does to n2.
func TestKilledAtEachChange(t *testing.T) {
	t.Parallel()
	for _, cut := range whole() {
		if strings.HasPrefix(cut, "n3 ") {
			continue
		}
		t.Run(cut, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				r.Cut = cut
				r.boot()
				defer func() { r.Off() }()
				before := r.nodes[0].config
				if o := r.run("yes"); o.State != operation.Done {
					t.Fatalf("it ended as %s: %s", o.State, o.Error)
				}
				r.expect(whole())
				r.rotated(before)
			})
		})
	}
}

// The answer no takes everything back, on each node, the last first.
func TestNoTakesEverythingBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.boot()
		defer func() { r.Off() }()
		before := r.nodes[0].config
		if o := r.run("no"); o.State != operation.Failed || !strings.Contains(o.Error, "it wasn't confirmed") {
			t.Errorf("it ended as %s: %s", o.State, o.Error)
		}
		r.unchanged(before)
		want := whole()[:12]
		for _, phase := range []string{"kubelets", "issue", "drop"} {
			for _, n := range []string{"w1", "n3", "n2", "n1"} {
				want = append(want, n+" "+phase)
			}
		}
		r.expect(want)
		r.Did = nil
		if o := r.run("yes"); o.State != operation.Done {
			t.Errorf("the next rotation ended as %s: %s", o.State, o.Error)
		}
		r.rotated(before)
	})
}

// A node that joins while the operation waits for its answer has the old authorities: everything is taken back, and the
// next rotation has it, too.
func TestNodeThatJoinsMeanwhile(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.boot()
		defer func() { r.Off() }()
		before := r.nodes[0].config
		last := *r.nodes[3]
		o, err := r.start()
		operationtest.Put(t, err)
		for o.Question == nil {
			time.Sleep(time.Second)
			o, err = r.Runner.Get(o.ID)
			operationtest.Put(t, err)
		}
		last.name, last.address = "w2", netip.AddrFrom4([4]byte{10, 5, 0, 9})
		r.Mu.Lock()
		r.nodes = append(r.nodes, &last)
		r.Mu.Unlock()
		if o = r.end(o.ID, "yes"); o.State != operation.Failed || !strings.Contains(o.Error, "node w2 has joined") {
			t.Errorf("it ended as %s: %s", o.State, o.Error)
		}
		r.unchanged(before)
		if o := r.run("yes"); o.State != operation.Done {
			t.Errorf("the next rotation ended as %s: %s", o.State, o.Error)
		}
		r.rotated(before)
	})
}

func TestAbort(t *testing.T) {
	t.Parallel()
	for _, when := range []string{"n2 accept", "n2 issue", "w1 kubelets"} {
		t.Run(when, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				r.boot()
				defer func() { r.Off() }()
				before := r.nodes[0].config
				o, err := r.start()
				operationtest.Put(t, err)
				r.until(when)
				operationtest.Put(t, r.Runner.Abort(o.ID, "jo"))
				if o = r.end(o.ID, ""); o.State != operation.Aborted {
					t.Errorf("it ended as %s: %s", o.State, o.Error)
				}
				r.unchanged(before)
			})
		})
	}
}

// Another control plane goes on with the same authorities, also back.
func TestTakeOver(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		when, answer string
		state        operation.State
	}{{"n3 accept", "yes", operation.Done}, {"n2 issue", "yes", operation.Done}, {"w1 kubelets", "no", operation.Failed}, {"n3 drop", "yes", operation.Done}} {
		t.Run(c.when+" "+c.answer, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				r.boot()
				before := r.nodes[0].config
				o, err := r.start()
				operationtest.Put(t, err)
				if strings.HasSuffix(c.when, "drop") {
					for o.Question == nil {
						time.Sleep(time.Second)
						o, err = r.Runner.Get(o.ID)
						operationtest.Put(t, err)
					}
					operationtest.Put(t, r.Runner.Answer(o.ID, o.Question.ID, "yes", "jo"))
				}
				r.until(c.when)
				r.Off()
				r.me, r.Shared.Node = 1, "n2"
				r.boot()
				defer func() { r.Off() }()
				_, err = r.Runner.TakeOver(t.Context(), o.ID, "jo", func(operation.Operation) error { return nil })
				operationtest.Put(t, err)
				if o = r.end(o.ID, c.answer); o.State != c.state {
					t.Fatalf("it ended as %s: %s", o.State, o.Error)
				}
				if c.state == operation.Done {
					r.rotated(before)
				} else {
					r.unchanged(before)
				}
			})
		})
	}
}

// The coordinator is gone before another control plane has the new keys: nothing is lost, and
// the next rotation cleans up.
func TestTakeOverWithoutKeys(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.boot()
		before := r.nodes[0].config
		o, err := r.start()
		operationtest.Put(t, err)
		r.until("n1 accept")
		r.Off()
		r.me, r.Shared.Node = 1, "n2"
		r.boot()
		defer func() { r.Off() }()
		_, err = r.Runner.TakeOver(t.Context(), o.ID, "jo", func(operation.Operation) error { return nil })
		operationtest.Put(t, err)
		if o = r.end(o.ID, "yes"); o.State != operation.Failed {
			t.Errorf("it ended as %s: %s", o.State, o.Error)
		}
		if o = r.run("yes"); o.State != operation.Done {
			t.Fatalf("the next one ended as %s: %s", o.State, o.Error)
		}
		for range 2 { // an unfinished one is brought to its end first
			if bytes.Equal(r.nodes[1].config.Cluster.CA.Crt, before.Cluster.CA.Crt) {
				if o = r.run("yes"); o.State != operation.Done {
					t.Fatalf("the next one ended as %s: %s", o.State, o.Error)
				}
			}
		}
		r.rotated(before)
	})
}

// A node is gone at the drop: the same command brings all nodes to the same authorities.
func TestFailedDropIsFinished(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.boot()
		defer func() { r.Off() }()
		before := r.nodes[0].config
		o, err := r.start()
		operationtest.Put(t, err)
		for o.Question == nil {
			time.Sleep(time.Second)
			o, err = r.Runner.Get(o.ID)
			operationtest.Put(t, err)
		}
		r.lost = "n3"
		if o = r.end(o.ID, "yes"); o.State != operation.Failed || !strings.Contains(o.Error, "n3") {
			t.Errorf("it ended as %s: %s", o.State, o.Error)
		}
		r.lost = ""
		now := r.nodes[0].config
		o, err = r.Runner.Start(t.Context(), operation.Ask{Name: Name, Arguments: &apiv1.RotateCARequest{}, DryRun: true})
		operationtest.Put(t, err)
		if len(o.Warnings) != 1 || !strings.Contains(o.Warnings[0], "no new authority is made") {
			t.Errorf("warnings: %q", o.Warnings)
		}
		if o = r.run("yes"); o.State != operation.Done {
			t.Fatalf("the next one ended as %s: %s", o.State, o.Error)
		}
		r.rotated(before)
		if !bytes.Equal(now.Cluster.CA.Crt, r.nodes[0].config.Cluster.CA.Crt) {
			t.Error("it has made new authorities")
		}
	})
}

// Only what is chosen is replaced, with the kind of key that it had.
func TestChosen(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		key, err := pki.NewKey(pki.RSA)
		operationtest.Put(t, err)
		for _, m := range r.nodes[:3] {
			old := encode(m.config.Cluster.ServiceAccount.Key)
			m.document = bytes.Replace(m.document, []byte(old), []byte(encode(key)), 1)
			m.config, _, err = config.Load(m.name, m.document)
			operationtest.Put(t, err)
		}
		r.boot()
		defer func() { r.Off() }()
		before := r.nodes[0].config
		began := time.Now()
		if o := r.run("yes", config.ServiceAccountKey); o.State != operation.Done {
			t.Fatalf("it ended as %s: %s", o.State, o.Error)
		}
		if time.Since(began) < tokenLife {
			t.Error("it didn't wait until all tokens are of the new key")
		}
		after := r.nodes[0].config
		if !bytes.Equal(before.Cluster.CA.Crt, after.Cluster.CA.Crt) || !bytes.Equal(before.Machine.CA.Crt, after.Machine.CA.Crt) {
			t.Error("another authority was replaced")
		}
		made, err := pki.EncodePublicKey(after.Cluster.ServiceAccount.Key)
		operationtest.Put(t, err)
		if bytes.Equal(after.Cluster.ServiceAccount.Key, key) || len(made) < 400 { // RSA
			t.Errorf("the key is\n%s", made)
		}
		if slices.ContainsFunc(r.Did, func(did string) bool { return strings.HasPrefix(did, "w1") }) {
			t.Errorf("the worker was changed: %q", r.Did)
		}
		if _, err := r.start("nonsense"); err == nil || !strings.Contains(err.Error(), "there is no authority") {
			t.Errorf("%v", err)
		}
	})
}

// The node restarts before the first step: the step waits until the cluster answers.
func TestRestartBeforeTheFirstStep(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.Restart.On = true
		r.boot()
		defer func() { r.Off() }()
		if o := r.run("yes"); o.State != operation.Done {
			t.Errorf("it ended as %s: %s", o.State, o.Error)
		}
	})
}
