package etcd

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/kubernetes/balancer"
	"github.com/garboard-os/garboard/services/kubernetes/roster"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/configuration"
)

const (
	// rosterKey is the prefix of the records of workers.
	rosterKey = "/garboard.dev/nodes/"
	// tokensKey is the prefix of the hashes of tokens.
	tokensKey = "/garboard.dev/join-tokens/"
	// kubernetesKey is the default of the API server's --etcd-prefix, and nodesKey is below it.
	kubernetesKey = "/registry"
	nodesKey      = "/minions/"
	// rosterTimeout is for each of two ways to ask: a node that waits for trustd has 10 s.
	rosterTimeout = 3 * time.Second
)

// Roster is what etcd knows of the cluster's nodes. A node that has begun no etcd yet knows
// its own names only: there is no cluster, or it is about to join one.
func (e *Etcd) Roster(ctx context.Context) (f roster.Facts, err error) {
	f.Now = time.Now()
	own, err := e.ownNames(&f)
	if err != nil {
		return f, err
	}
	if r, err := e.read(); err != nil || r.Phase == none {
		return f, err
	}
	if err = e.askRoster(ctx, &f, e.voters); err == nil {
		e.note(ctx, f, own)
		return f, nil
	}
	// Without a quorum, what this member knows is enough for a machine that is recorded: a name
	// is given with a quorum only (Enlist).
	alone := e.askRoster(ctx, &f, func(_, life context.Context) (*clientv3.Client, error) { return e.local(life) }, clientv3.WithSerializable())
	return f, errors.Join(alone, map[bool]error{true: noAnswer(err)}[alone != nil])
}

// note records all addresses of this control plane, as a member of etcd has one only, and one worker that has joined;
// the next one who asks, the next one.
func (e *Etcd) note(ctx context.Context, f roster.Facts, own []netip.Addr) {
	ctx, cancel := context.WithTimeout(ctx, rosterTimeout)
	defer cancel()
	me, err := e.o.self()
	if r := f.Records[me.name]; err == nil && f.MayControl(me.name) == nil && !slices.Equal(r.Addresses, own) {
		// else the next time
		_ = e.Enlist(ctx, me.name, roster.Record{Addresses: own, Since: f.Now, Joined: true, Revision: r.Revision})
	}
	for name, r := range f.Records {
		if f.Nodes[name] && !r.Joined {
			r.Joined = true
			_ = e.Enlist(ctx, name, r) // else the next one who asks does
			return
		}
	}
}

// askRoster sets what etcd knows, and adds to the rest.
func (e *Etcd) askRoster(ctx context.Context, f *roster.Facts, dial func(ctx, life context.Context) (*clientv3.Client, error), how ...clientv3.OpOption) error {
	ctx, cancel := context.WithTimeout(ctx, rosterTimeout)
	defer cancel()
	c, err := dial(ctx, ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	found, err := c.MemberList(ctx, how...)
	cfg, none := configuration.Config(e.o.Store)
	if err = cmp.Or(err, none); err != nil {
		return err
	}
	f.Records, f.Tokens, f.Nodes = map[string]roster.Record{}, map[string]roster.Token{}, map[string]bool{}
	nodes := cmp.Or(cfg.Cluster.APIServer.ExtraArgs.Get("etcd-prefix"), kubernetesKey) + nodesKey
	// One transaction: a Node and its record are of the same moment.
	got, err := c.Txn(ctx).Then(
		clientv3.OpGet(rosterKey, append(how, clientv3.WithPrefix())...), clientv3.OpGet(nodes, append(how, clientv3.WithPrefix(), clientv3.WithKeysOnly())...),
		clientv3.OpGet(tokensKey, append(how, clientv3.WithPrefix())...),
	).Commit()
	if err != nil {
		return err
	}
	for _, m := range found.Members {
		if m.Name != "" { // or it was never started
			f.Names = append(f.Names, strings.ToLower(m.Name))
		}
		f.Addresses = append(f.Addresses, hosts(append(m.PeerURLs, m.ClientURLs...))...)
	}
	for _, kv := range got.Responses[0].GetResponseRange().Kvs {
		name, r := strings.TrimPrefix(string(kv.Key), rosterKey), roster.Record{}
		if err := json.Unmarshal(kv.Value, &r); err != nil {
			return fmt.Errorf("record %s in etcd: %w", kv.Key, err)
		}
		r.Revision = kv.ModRevision
		f.Records[name] = r
		if slices.Contains(f.Names, strings.ToLower(name)) {
			f.Addresses = append(f.Addresses, r.Addresses...)
		}
	}
	for _, kv := range got.Responses[1].GetResponseRange().Kvs {
		f.Nodes[strings.TrimPrefix(string(kv.Key), nodes)] = true
	}
	for _, kv := range got.Responses[2].GetResponseRange().Kvs {
		var t roster.Token
		if err := json.Unmarshal(kv.Value, &t); err != nil {
			return fmt.Errorf("record %s in etcd: %w", kv.Key, err)
		}
		f.Tokens[strings.TrimPrefix(string(kv.Key), tokensKey)] = t
	}
	return nil
}

// ownNames adds the names and addresses of this control plane, those that all share, and the
// addresses of all API servers. It returns its own addresses, with those that all share.
func (e *Etcd) ownNames(f *roster.Facts) (addresses []netip.Addr, err error) {
	own, err := secrets.API.Get(e.o.Store, secrets.APIID)
	if err != nil {
		return nil, err
	}
	cert, err := pki.ParseCert(own.Spec.Serving.Crt)
	if err != nil {
		return nil, err
	}
	f.Names = append(f.Names, lists.Of(cert.DNSNames, strings.ToLower)...)
	for _, ip := range cert.IPAddresses {
		if addr, _ := netip.AddrFromSlice(ip); !addr.IsLoopback() {
			f.Addresses = append(f.Addresses, addr.Unmap())
		}
	}
	addresses = slices.Clone(f.Addresses)
	for _, s := range balancer.APIServers.List(e.o.Store) {
		if at, err := netip.ParseAddrPort(s.ID); err == nil {
			f.Addresses = append(f.Addresses, at.Addr().Unmap())
		}
	}
	return addresses, nil
}

// errRosterChanged: another control plane was faster.
var errRosterChanged = errors.New("the record of this name was changed meanwhile: try again")

// Enlist records a worker, in the place of the record with this revision. If several control planes record the same
// machine, one of them does.
func (e *Etcd) Enlist(ctx context.Context, name string, r roster.Record) error {
	return e.record(ctx, r, func(ctx context.Context, c *clientv3.Client, value string) error {
		key := rosterKey + name
		got, err := c.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(key), "=", r.Revision)).Then(clientv3.OpPut(key, value)).Else(clientv3.OpGet(key)).Commit()
		if err != nil || got.Succeeded {
			return noAnswer(err)
		}
		var has roster.Record
		if kvs := got.Responses[0].GetResponseRange().Kvs; len(kvs) == 0 || json.Unmarshal(kvs[0].Value, &has) != nil || has.Key != r.Key || has.Certified != r.Certified || has.Joined != r.Joined ||
			!slices.Equal(has.Addresses, r.Addresses) || !slices.Equal(has.Taints, r.Taints) {
			return errRosterChanged
		}
		return nil
	})
}

// forgetToken is how long a token that has ended is remembered: longer than clocks of control planes differ.
const forgetToken = time.Hour

// EnlistToken records the token with an ID. forget: its record is needed until its end only.
func (e *Etcd) EnlistToken(ctx context.Context, id string, t roster.Token, forget bool) error {
	return e.record(ctx, t, func(ctx context.Context, c *clientv3.Client, value string) error {
		var how []clientv3.OpOption
		if forget {
			lease, err := c.Grant(ctx, int64((max(time.Until(t.Ends), 0) + forgetToken).Seconds()))
			if err != nil {
				return noAnswer(err)
			}
			how = append(how, clientv3.WithLease(lease.ID))
		}
		_, err := c.Put(ctx, tokensKey+id, value, how...)
		return noAnswer(err)
	})
}

// record has put write a value, with a quorum. A node that has begun no etcd yet records nothing.
func (e *Etcd) record(ctx context.Context, value any, put func(ctx context.Context, c *clientv3.Client, value string) error) error {
	if j, err := e.read(); err != nil || j.Phase == none {
		return err
	}
	text, err := json.Marshal(value)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	c, err := e.voters(ctx, ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	return put(ctx, c, string(text))
}
