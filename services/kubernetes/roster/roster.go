// Package roster decides which node may have a name. The facts are those of etcd alone,
// where no pod and no worker can write: its members, which are the control planes; a record
// of each worker, with the key of its machine API; the hashes of the tokens with which machines
// join; and the names of Kubernetes' Nodes. What a Node object says of itself decides nothing.
//
//	trustd ──▶ MaySign: a certificate of the machine API       (the first one binds the name to its key)
//	kubelet ─▶ MayJoin, MayRenew: a client certificate of Kubernetes (proven with that key; it binds the name, too)
//	kubelet ─▶ MayServe: a serving certificate                 (for an address of nobody else)
//	etcd ────▶ MayControl: a new control plane's name
//
// A name is free when its Node is deleted: only administrators delete Nodes. A name without a Node is one machine's
// for good as soon as this has a client certificate, which nobody can take back: an administrator frees it.
package roster

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/services/core/reason"
)

// Grace is how long a record counts of a worker that has no client certificate yet.
const Grace = 15 * time.Minute

// A Record is of one worker. That of a control plane has addresses only.
type Record struct {
	Key       string       `json:"key"`                 // of its machine API (pki.KeyID)
	Address   netip.Addr   `json:"address"`             // from which it asked, as TCP proves
	Addresses []netip.Addr `json:"addresses,omitempty"` // all of a control plane; those that a worker serves with
	Taints    []string     `json:"taints,omitempty"`    // of the Node by the worker's configuration: key=effect
	Since     time.Time    `json:"since"`
	Certified bool         `json:"certified,omitempty"` // it has a client certificate: the name isn't free after Grace
	// its Node was seen: the name is free when there is none any more
	Joined bool `json:"joined,omitempty"`

	// Revision of the record in etcd; 0 if there is none.
	Revision int64 `json:"-"`
}

// Facts are what etcd knows of the cluster's nodes. The zero value is a cluster that has
// not begun.
type Facts struct {
	// Names, in lower case, and Addresses are those of the control planes, and of what they share.
	Names     []string
	Addresses []netip.Addr
	Records   map[string]Record // nil: this control plane is no member of etcd yet
	Nodes     map[string]bool   // Kubernetes has a Node with this name
	Tokens    map[string]Token  // by TokenID
	Now       time.Time
}

// Record is the record of a name, if the name isn't free.
func (f Facts) Record(name string) (Record, bool) {
	r, known := f.Records[name]
	return r, known && (f.Nodes[name] || !r.Joined && (r.Certified || f.Now.Sub(r.Since) < Grace))
}

// Renewed is the record of a machine that may have the name, in the place of the one that is there.
func (f Facts) Renewed(name string, r Record) Record {
	r.Since, r.Revision = f.Now, f.Records[name].Revision
	if had, known := f.Record(name); known {
		r.Since, r.Joined, r.Certified = had.Since, had.Joined, had.Certified || r.Certified
		r.Addresses, r.Taints = had.Addresses, had.Taints
	}
	return r
}

// free says how a name becomes free.
func free(name string) string {
	return fmt.Sprintf("give one of the two another machine.network.hostname, or if that one is gone: kubectl delete node %s, or gbctl token revoke node/%[1]s if there is no such Node", name)
}

// MaySign decides about the certificate of the machine API of a node at an address. proven:
// the caller has shown that it is the node of Kubernetes with this name.
func (f Facts) MaySign(name, key string, from netip.Addr, proven bool) error {
	if slices.Contains(f.Addresses, from) {
		return fmt.Errorf("the address %s is one of the control planes'", from)
	}
	return f.mayHave(name, key, proven)
}

// MayJoin decides about the first client certificate of Kubernetes. key is that of the machine API
// whose holder made the request, or "": trustd gives each machine one before.
func (f Facts) MayJoin(name, key string) error {
	if err := f.mayHave(name, key, false); err != nil || key != "" {
		return err
	}
	return fmt.Errorf("the request for the name %s isn't signed with the key of a certificate of the machine API: the machine needs one of trustd first (port 50001 of a control plane, machine.token)", name)
}

// MayRenew decides about another client certificate, for the holder of one. A node that isn't recorded is one
// of a former release, whose kubelet can't sign.
func (f Facts) MayRenew(name, key string) error {
	_, recorded := f.Records[name]
	if _, known := f.Record(name); !known && (recorded || !f.Nodes[name]) {
		return fmt.Errorf("the name %s isn't this machine's any more, as its Node was deleted: it has to join again", name)
	}
	return f.mayHave(name, key, !recorded)
}

// MayControl decides about the name of a new control plane.
func (f Facts) MayControl(name string) error {
	if r, known := f.Record(name); known && r.Key != "" {
		return taken("the name %s belongs to a worker, at %s; %s", name, r.Address, free(name))
	}
	return nil
}

// mayHave decides about a name. Its errors have the code NameTaken.
func (f Facts) mayHave(name, key string, proven bool) error {
	r, known := f.Record(name)
	switch {
	case slices.Contains(f.Names, strings.ToLower(name)):
		return taken("the name %s is one of the control planes'; give this machine another machine.network.hostname", name)
	case known && key != "" && r.Key == key, proven:
		return nil
	case known && key == "":
		return taken("the name %s belongs to a machine that signs its requests, and this one isn't signed; %s", name, free(name))
	case known:
		return taken("the name %s belongs to a machine with another key, at %s; %s", name, r.Address, free(name))
	case f.Nodes[name]:
		return taken("there is a node %s, and this machine doesn't show that it is that node; %s", name, free(name))
	}
	return nil
}

// NameTaken is the code of errors about a name that another machine has.
const NameTaken reason.Code = "NameTaken"

func taken(format string, args ...any) error {
	return reason.With(NameTaken, fmt.Errorf(format, args...))
}

// MayServe decides about an address in the serving certificate of a worker's kubelet.
func (f Facts) MayServe(name string, address netip.Addr) error {
	if slices.Contains(f.Addresses, address) {
		return fmt.Errorf("address %s is one of the control planes'", address)
	}
	for other := range f.Records {
		if r, known := f.Record(other); known && other != name && (r.Address == address || slices.Contains(r.Addresses, address)) {
			return fmt.Errorf("address %s is also that of node %q", address, other)
		}
	}
	return nil
}

// A Token lets machines get their first certificate of the machine API until its end. It is of
// `gbctl token create`, or machine.token of a control plane, to which somebody has given an end.
type Token struct {
	Hash string    `json:"hash"` // of the whole token, SHA-256, hexadecimal
	Ends time.Time `json:"ends"`
}

// TokenID is the part of a token that is no secret.
func TokenID(token string) string {
	id, _, _ := strings.Cut(token, ".")
	return id
}

// NewToken is what is recorded of a token.
func NewToken(token string, ends time.Time) Token {
	hash := sha256.Sum256([]byte(token))
	return Token{Hash: hex.EncodeToString(hash[:]), Ends: ends}
}

// Admits reports whether a machine may join with a token: a recorded one until its end, or that of the
// configuration, which has none unless it is recorded, too.
func (f Facts) Admits(token, configured string) bool {
	want, recorded := f.Tokens[TokenID(token)]
	if !recorded {
		want = NewToken(configured, f.Now.Add(Grace))
	}
	// Hashes have one length, so that comparing them reveals nothing of the token.
	same := subtle.ConstantTimeCompare([]byte(NewToken(token, f.Now).Hash), []byte(want.Hash)) == 1
	return same && f.Now.Before(want.Ends)
}
