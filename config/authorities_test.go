package config

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/config/pki"
)

// authority makes another one.
func authority(t *testing.T) CertKey {
	t.Helper()
	ca, err := pki.NewKubernetesCA(testTime)
	if err != nil {
		t.Fatal(err)
	}
	return CertKey{Crt: ca.Cert, Key: ca.Key}
}

// Each authority is replaced without a reboot: accept the new one, exchange both, end the
// old one. Without the first step, or without the old one in the list, it needs a reboot.
func TestRotationNeedsNoReboot(t *testing.T) {
	fresh := authority(t)
	for _, a := range Authorities {
		for _, typ := range []MachineType{ControlPlane, Worker} {
			if typ == Worker && !a.Workers {
				continue
			}
			t.Run(a.Name+" "+string(typ), func(t *testing.T) {
				before, _ := accepted(t, document(t, typ))
				phase := func(from *Config, issuing CertKey, accepts ...CertKey) *Config {
					next := *from
					i, list := a.Of(&next)
					*i, *list = issuing, accepts
					return &next
				}
				old, _ := a.Of(before)
				accepting := phase(before, *old, fresh)
				issuing := phase(accepting, fresh, *old)
				dropped := phase(issuing, fresh)
				restart := map[string][]Effect{
					EtcdAuthority: {Restart("etcd")}, KubernetesAuthority: {Restart("kubelet")},
				}[a.Name]
				if restart == nil {
					restart = []Effect{Live}
				}
				exchange := []Effect{Live}
				if a.Name == KubernetesAuthority {
					exchange = []Effect{Live, Restart("kubelet")}
				}
				for name, c := range map[string]struct {
					from, to *Config
					want     []Effect
				}{
					"accept": {before, accepting, restart}, "exchange": {accepting, issuing, exchange}, "back": {issuing, accepting, exchange}, "end": {issuing, dropped, restart},
					"not accepted before": {before, issuing, nil}, "old one not accepted": {accepting, dropped, nil},
				} {
					got := Effects(Diff(c.from, c.to))
					if c.want == nil {
						if !slices.Contains(got, Reboot) {
							t.Errorf("%s: %v, and no reboot", name, got)
						}
					} else if !slices.Equal(got, c.want) {
						t.Errorf("%s: %v, want %v: %v", name, got, c.want, Diff(c.from, c.to))
					}
				}
			})
		}
	}
}

// The key of Secrets in etcd is replaced without a reboot in the same steps.
func TestSecretRotatesWithoutAReboot(t *testing.T) {
	before, _ := accepted(t, document(t, ControlPlane))
	with := func(used Secret, accepted ...Secret) *Config {
		c := *before
		c.Cluster.Secret, c.Cluster.AcceptedSecrets = used, accepted
		return &c
	}
	old, fresh := NewKey32(), NewKey32()
	for name, c := range map[string]struct {
		from, to *Config
		want     Effect
	}{
		"accept": {with(old), with(old, fresh), Live}, "exchange": {with(old, fresh), with(fresh, old), Live}, "end": {with(fresh, old), with(fresh), Live},
		"not accepted before": {with(old), with(fresh, old), Reboot}, "old one not accepted": {with(old, fresh), with(fresh), Reboot},
	} {
		got := Effects(Diff(c.from, c.to))
		if slices.Contains(got, Reboot) != (c.want == Reboot) || !slices.Contains(got, c.want) {
			t.Errorf("%s: %v, want %v: %v", name, got, c.want, Diff(c.from, c.to))
		}
		was, err := c.from.Digests()
		if err != nil {
			t.Fatal(err)
		}
		if is, err := c.to.Digests(); err != nil || is[AtRestKey] == was[AtRestKey] {
			t.Errorf("%s: the digest stays %s, %v", name, is[AtRestKey], err)
		}
	}
	worker, _ := accepted(t, document(t, Worker))
	next := *worker
	next.Cluster.Secret = fresh
	if got := Effects(Diff(worker, &next)); !slices.Equal(got, []Effect{Live}) {
		t.Errorf("on a worker: %v", got)
	}
}

func TestAcceptedAuthoritiesAreChecked(t *testing.T) {
	s := testSecrets()
	other, one, two := authority(t), string(NewKey32()), string(NewKey32())
	text := func(k CertKey) string { return fmt.Sprintf("{crt: %s}", encodePEM(k.Crt)) }
	leaf, _, err := other.CA().Issue(pki.Leaf{CN: "x", Client: true, Now: testTime})
	if err != nil {
		t.Fatal(err)
	}
	public, err := pki.EncodePublicKey(s.ServiceAccount)
	if err != nil {
		t.Fatal(err)
	}
	for lines, want := range map[string]string{
		"acceptedCAs: [" + text(other) + "]":                                                 "",
		"acceptedCAs: [" + text(other) + ", " + text(other) + "]":                            "cluster.acceptedCAs[1]: is there twice",
		"acceptedCAs: [" + text(s.KubernetesCA) + "]":                                        "cluster.acceptedCAs[0]: is there twice",
		"acceptedCAs: [" + text(CertKey{Crt: leaf}) + "]":                                    "is not a CA certificate",
		"acceptedCAs: [{key: " + encodePEM(other.Key) + "}]":                                 "cluster.acceptedCAs[0].crt",
		"acceptedCAs: [" + strings.Repeat(text(other)+",", 9) + "]":                          "has 9 authorities; at most 8",
		"serviceAccount: {acceptedKeys: [" + encodePEM(public) + "]}":                        "",
		"secret: " + one + "\nacceptedSecrets: [" + two + "]":                                "",
		"secret: " + one + "\nacceptedSecrets: [" + one + "]":                                "cluster.acceptedSecrets[0]: must be base64 of 32 bytes, one of at most 8",
		"secret: " + one + "\nacceptedSecrets: [" + two + ", " + two + "]":                   "cluster.acceptedSecrets[1]: must be",
		"secret: " + one + "\nacceptedSecrets: [YQ==]":                                       "cluster.acceptedSecrets[0]: must be",
		"secret: ''\nacceptedSecrets: [" + two + "]":                                         "cluster.acceptedSecrets[0]: must be base64",
		"serviceAccount: {acceptedKeys: [" + encodePEM(other.Crt) + "]}":                     "cluster.serviceAccount.acceptedKeys[0]",
		"serviceAccount: {acceptedKeys: [" + strings.Repeat(encodePEM(public)+",", 2) + "]}": "acceptedKeys[1]: is there twice",
	} {
		doc := document(t, Worker) // which has no key of its own
		_, _, problems := load(t, with(doc, "cluster", lines))
		got := strings.Join(problems, "\n")
		if want == "" && got != "" || !strings.Contains(got, want) {
			t.Errorf("%.60s…: %q, and not %q", lines, got, want)
		}
	}
}

// The order of the authorities doesn't matter to programs, but which one issues is in the
// digests.
func TestTrustedAndDigests(t *testing.T) {
	a, b := authority(t), authority(t)
	one, two := Trusted(a, []CertKey{b}), Trusted(b, []CertKey{a})
	if !bytes.Equal(one, two) || bytes.Count(one, []byte("BEGIN CERTIFICATE")) != 2 {
		t.Errorf("%s\nand\n%s", one, two)
	}
	if alone := Trusted(a, nil); !bytes.Equal(alone, a.Crt) {
		t.Errorf("the only one is changed: %s", alone)
	}
	c, _ := accepted(t, document(t, ControlPlane))
	digests := func() map[string]string {
		all, err := c.Digests()
		if err != nil {
			t.Fatal(err)
		}
		return all
	}
	before := digests()
	if len(before) != 6 {
		t.Errorf("digests of %v", before)
	}
	old := c.Cluster.CA
	c.Cluster.AcceptedCAs = []CertKey{a}
	accepting := digests()
	c.Cluster.CA, c.Cluster.AcceptedCAs = a, []CertKey{old}
	issuing := digests()
	if x, y, z := before[KubernetesAuthority], accepting[KubernetesAuthority], issuing[KubernetesAuthority]; x == y || y == z || x == z {
		t.Errorf("%s, %s, %s", x, y, z)
	}
	if before[EtcdAuthority] != issuing[EtcdAuthority] {
		t.Error("the digest of etcd's authority has changed")
	}
	key := c.Cluster.ServiceAccount.Key
	private, err := pki.NewKey(pki.ECDSA)
	if err != nil {
		t.Fatal(err)
	}
	c.Cluster.ServiceAccount = ServiceAccount{Key: private, AcceptedKeys: []KeyPEM{key}}
	public, err := c.Cluster.ServiceAccount.PublicKeys()
	if err != nil || bytes.Count(public, []byte("BEGIN PUBLIC KEY")) != 2 || bytes.Contains(public, []byte("PRIVATE")) {
		t.Errorf("%s, %v", public, err)
	}
}
