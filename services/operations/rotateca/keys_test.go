package rotateca

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/operation"
)

// sealedWith checks the key of Secrets in etcd of a node, and that all of them are encrypted with it.
func (r *rig) sealedWith(m *member, want config.Secret) {
	r.T.Helper()
	c := m.config.Cluster
	if m.name[0] == 'w' {
		want = ""
	} else {
		for name, key := range r.sealed {
			if key != want {
				r.T.Errorf("the Secret %s has another key than the nodes", name)
			}
		}
	}
	if c.Secret != want || len(c.AcceptedSecrets) > 0 {
		r.T.Errorf("node %s has another key of Secrets, or %d accepted ones", m.name, len(c.AcceptedSecrets))
	}
}

// Only the key of Secrets in etcd, and the tokens: no certificate is issued, and nothing of them is in the record.
func TestKeyOfSecretsAndTokens(t *testing.T) {
	t.Parallel()
	for _, names := range [][]string{{config.AtRestKey}, {JoinTokens}, {config.AtRestKey, JoinTokens}} {
		t.Run(strings.Join(names, " "), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				r.boot()
				defer func() { r.Off() }()
				before := r.nodes[0].config
				if o := r.run("yes", names...); o.State != operation.Done {
					t.Fatalf("it ended as %s: %s", o.State, o.Error)
				}
				r.noKeys()
				c := r.nodes[2].config
				if key := slices.Contains(names, config.AtRestKey); key != (c.Cluster.Secret != before.Cluster.Secret) {
					t.Errorf("the key of Secrets is another one: %v", !key)
				}
				if tokens := slices.Contains(names, JoinTokens); tokens != (c.Machine.Token != before.Machine.Token) || tokens != (r.ended != "") {
					t.Errorf("the tokens are others: %v, and %q has ended", !tokens, r.ended)
				}
				for _, m := range r.nodes[:3] {
					r.sealedWith(m, r.nodes[0].config.Cluster.Secret)
				}
				if !bytes.Equal(c.Machine.CA.Crt, before.Machine.CA.Crt) || !bytes.Equal(c.Cluster.ServiceAccount.Key, before.Cluster.ServiceAccount.Key) || slices.ContainsFunc(r.Did, func(did string) bool { return strings.HasPrefix(did, "w1") }) {
					t.Errorf("something else was changed: %q", r.Did)
				}
			})
		})
	}
}

// Without a key, there is none to replace.
func TestNoSecretIsEncrypted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		for _, m := range r.nodes[:3] {
			c := *m.config
			c.Cluster.Secret = ""
			m.config = &c
		}
		r.sealed = nil
		others := slices.DeleteFunc(slices.Clone(names), func(name string) bool { return name == config.AtRestKey })
		r.boot()
		defer func() { r.Off() }()
		if _, err := r.Runner.Start(t.Context(), operation.Ask{Name: Name, Arguments: &apiv1.RotateCARequest{Authorities: []string{config.AtRestKey}}, DryRun: true}); err == nil || !strings.Contains(err.Error(), "cluster.secret is missing") {
			t.Errorf("%v", err)
		}
		if _, err := r.Runner.Start(t.Context(), operation.Ask{Name: Name, Arguments: &apiv1.RotateCARequest{Authorities: others}, DryRun: true}); err != nil {
			t.Errorf("all others: %v", err)
		}
	})
}
