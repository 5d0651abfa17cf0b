package api

import (
	"cmp"
	"context"
	"encoding/base64"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/roster"
	"github.com/garboard-os/garboard/services/system/configuration"
)

// A token with which machines join is a Secret. The API server accepts it until its end, and
// then kube-controller-manager removes it. Its hash is in etcd, where trustd of all control planes
// looks it up; machine.token of the configuration is there when it has an end. A node that has joined needs none.
const (
	tokenType = "bootstrap.kubernetes.io/token"
	tokenName = "bootstrap-token-" // its ID follows
	// madeToken is the label of tokens that CreateToken has made.
	madeToken = "garboard.dev/join-token"
	// endedToken keeps the Secret of any other token after its end: control planes make the one
	// of the configuration when it is missing, without an end.
	endedToken   = "garboard.dev/ended-token"
	maxTokenLife = 365 * 24 * time.Hour
	// heldName is before a name that a machine has and no Node, in the place of the ID of a token: ending that frees
	// the name.
	heldName = "node/"
)

// tokenRef is the Secret with a name; "" is for all.
func tokenRef(name string) kubeclient.Ref {
	return kubeclient.Ref{APIVersion: "v1", Kind: "Secret", Namespace: "kube-system", Name: name}
}

// tokenText is a field of a token, and tokenEnd its end, or zero.
func tokenText(o kubeclient.Object, field string) string {
	text, _ := base64.StdEncoding.DecodeString(o.Text("data", field))
	return string(text)
}

func tokenEnd(o kubeclient.Object) time.Time {
	end, _ := time.Parse(time.RFC3339, tokenText(o, "expiration"))
	return end
}

// accessService gives out what people and machines come into the cluster with.
type accessService struct{ opts Options }

// controlPlane is the configuration of this node, if it is a control plane. Only those hold what.
func (s *accessService) controlPlane(what string) (*config.Config, error) {
	c, err := configuration.Config(s.opts.Store)
	if err != nil {
		return nil, applyError(configuration.ErrNoConfig)
	}
	if !c.Machine.Type.ControlPlane() {
		return nil, failed(connect.CodeFailedPrecondition, "this node is a %s, which doesn't hold %s: ask a control plane", c.Machine.Type, what)
	}
	return c, nil
}

// Kubeconfig is there also before Kubernetes is.
func (s *accessService) Kubeconfig(_ context.Context, req *connect.Request[apiv1.KubeconfigRequest]) (*connect.Response[apiv1.KubeconfigResponse], error) {
	c, err := s.controlPlane("the cluster's authority")
	if err != nil {
		return nil, err
	}
	who, err := config.Access{User: req.Msg.GetUser(), Groups: req.Msg.GetGroups(), Validity: req.Msg.GetTtl().AsDuration()}.Complete()
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	data, expires, err := who.Kubeconfig(c.Cluster.Name, c.Cluster.ControlPlane.Endpoint.String(), c.Cluster.CA.CA(), c.Cluster.TrustedCAs(), time.Now())
	return connect.NewResponse(&apiv1.KubeconfigResponse{Kubeconfig: data, Expires: timestamppb.New(expires)}), err
}

// ClientCertificate signs for the caller, with its own name and roles.
func (s *accessService) ClientCertificate(ctx context.Context, req *connect.Request[apiv1.ClientCertificateRequest]) (*connect.Response[apiv1.ClientCertificateResponse], error) {
	c, err := s.controlPlane("the authority of the machine API")
	if err != nil {
		return nil, err
	}
	request, err := pki.ParseRequest(req.Msg.GetRequest())
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	caller := callOf(ctx)
	crt, err := c.Machine.CA.CA().Sign(request.PublicKey, pki.Leaf{CN: caller.peer, Orgs: caller.roles, Client: true, Now: time.Now()})
	return connect.NewResponse(&apiv1.ClientCertificateResponse{Certificate: crt, Authorities: c.Machine.TrustedCAs()}), err
}

// withKubernetes calls do with a client of the cluster's administrator.
func (s *accessService) withKubernetes(do func(*config.Config, *kubeclient.Client) error) error {
	c, err := s.controlPlane("the cluster's authority")
	if err != nil {
		return err
	}
	client, err := controlplane.AdminClient(s.opts.Store)
	if err == nil {
		defer client.Close()
		err = do(c, client)
	}
	if err != nil {
		return connect.NewError(connect.CodeFailedPrecondition, err)
	}
	return nil
}

func (s *accessService) CreateToken(ctx context.Context, req *connect.Request[apiv1.CreateTokenRequest]) (*connect.Response[apiv1.CreateTokenResponse], error) {
	life := req.Msg.GetTtl().AsDuration()
	if life < time.Minute || life > maxTokenLife {
		return nil, failed(connect.CodeInvalidArgument, "a token for %s: it must be for %s to %s", life, time.Minute, maxTokenLife)
	}
	token, end := string(config.NewToken()), time.Now().Add(life)
	id, secret, _ := strings.Cut(token, ".")
	err := s.withKubernetes(func(_ *config.Config, c *kubeclient.Client) error {
		if err := s.opts.EnlistToken(ctx, id, roster.NewToken(token, end), true); err != nil {
			return err
		}
		_, err := c.Create(ctx, kubeclient.Object{
			"apiVersion": "v1", "kind": "Secret", "type": tokenType,
			"metadata": map[string]any{"name": tokenName + id, "namespace": tokenRef("").Namespace, "labels": map[string]any{madeToken: ""}},
			"stringData": map[string]any{
				"token-id": id, "token-secret": secret, "usage-bootstrap-authentication": "true",
				"expiration": end.UTC().Format(time.RFC3339), "description": req.Msg.GetDescription(),
			},
		})
		return err
	})
	return connect.NewResponse(&apiv1.CreateTokenResponse{Token: token, Ends: timestamppb.New(end)}), err
}

func (s *accessService) ListTokens(ctx context.Context, _ *connect.Request[apiv1.ListTokensRequest]) (*connect.Response[apiv1.ListTokensResponse], error) {
	res := &apiv1.ListTokensResponse{}
	return connect.NewResponse(res), s.withKubernetes(func(cfg *config.Config, c *kubeclient.Client) error {
		facts, err := s.opts.Roster(ctx)
		if err != nil {
			return err
		}
		list, err := c.List(ctx, tokenRef(""), kubeclient.Selection{Fields: "type=" + tokenType})
		for _, o := range list.Items() {
			token := &apiv1.JoinToken{Id: strings.TrimPrefix(o.Name(), tokenName), Description: tokenText(o, "description"), Ends: timestamp(tokenEnd(o))}
			if token.Id == roster.TokenID(string(cfg.Cluster.Token)) {
				token.Description = "cluster.token of this node"
			}
			delete(facts.Tokens, token.Id)
			res.Tokens = append(res.Tokens, token)
		}
		own := roster.TokenID(string(cfg.Machine.Token))
		if _, ends := facts.Tokens[own]; !ends {
			res.Tokens = append(res.Tokens, &apiv1.JoinToken{Id: own, Description: "machine.token of this node"})
		}
		maps.DeleteFunc(facts.Tokens, func(id string, t roster.Token) bool { return id != own && t.Ends.Before(time.Now()) })
		for _, id := range slices.Sorted(maps.Keys(facts.Tokens)) {
			what := cmp.Or(map[string]string{own: "machine.token of this node"}[id], "for the machine API only")
			res.Tokens = append(res.Tokens, &apiv1.JoinToken{Id: id, Ends: timestamppb.New(facts.Tokens[id].Ends), Description: what})
		}
		for _, name := range slices.Sorted(maps.Keys(facts.Records)) {
			if r, holds := facts.Record(name); holds && !facts.Nodes[name] {
				res.Tokens = append(res.Tokens, &apiv1.JoinToken{Id: heldName + name, Description: fmt.Sprintf("a machine at %s has this name, and no Node", r.Address)})
			}
		}
		return err
	})
}

func (s *accessService) RevokeToken(ctx context.Context, req *connect.Request[apiv1.RevokeTokenRequest]) (*connect.Response[apiv1.RevokeTokenResponse], error) {
	id, end := req.Msg.GetId(), time.Now().Add(max(req.Msg.GetAfter().AsDuration(), 0))
	err := s.withKubernetes(func(cfg *config.Config, c *kubeclient.Client) error {
		forMachines, err := s.endForMachines(ctx, cfg, id, &end)
		if err != nil || strings.HasPrefix(id, heldName) {
			return err
		}
		o, err := c.Get(ctx, tokenRef(tokenName+id))
		if forMachines && kubeclient.IsNotFound(err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("token %q: %w (`gbctl token list` shows all)", id, err)
		}
		if has := tokenEnd(o); !has.IsZero() && has.Before(end) {
			end = has // it isn't put off
		}
		patch := kubeclient.Object{"stringData": map[string]any{"expiration": end.UTC().Format(time.RFC3339)}}
		if o.At("metadata", "labels", madeToken) == nil {
			patch["metadata"] = map[string]any{"finalizers": []any{endedToken}}
		}
		_, err = c.Merge(ctx, o.Ref(), patch)
		return err
	})
	return connect.NewResponse(&apiv1.RevokeTokenResponse{Message: fmt.Sprintf("token %s ends at %s", id, end.UTC().Format(time.RFC3339))}), err
}

// endForMachines ends the token with an ID for the machine API, unless it ends before. It reports whether there is one.
func (s *accessService) endForMachines(ctx context.Context, cfg *config.Config, id string, end *time.Time) (bool, error) {
	facts, err := s.opts.Roster(ctx)
	if err != nil {
		return false, err
	}
	if name, is := strings.CutPrefix(id, heldName); is {
		r, holds := facts.Record(name)
		if r.Joined = true; !holds || facts.Nodes[name] {
			return false, fmt.Errorf("no machine has the name %q without a Node (`gbctl token list` shows all)", name)
		}
		return false, s.opts.Enlist(ctx, name, r)
	}
	token, recorded := facts.Tokens[id]
	configured := id == roster.TokenID(string(cfg.Machine.Token))
	switch {
	case recorded && token.Ends.Before(*end):
		*end = token.Ends // it isn't put off
	case recorded:
		token.Ends = *end
	case configured:
		token = roster.NewToken(string(cfg.Machine.Token), *end)
	default:
		return false, nil
	}
	// That of the configuration is remembered for good: without its record it would have no end.
	return true, s.opts.EnlistToken(ctx, id, token, !configured)
}
