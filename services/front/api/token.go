package api

import (
	"context"
	"encoding/base64"
	"fmt"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
)

// A token with which machines join is a Secret. The API server accepts it until its end, and
// then kube-controller-manager removes it. A node that has joined needs none.
const (
	tokenType = "bootstrap.kubernetes.io/token"
	tokenName = "bootstrap-token-" // its ID follows
	// madeToken is the label of tokens that CreateToken has made.
	madeToken = "garboard.dev/join-token"
	// endedToken keeps the Secret of any other token after its end: control planes make the one
	// of the configuration when it is missing, without an end.
	endedToken   = "garboard.dev/ended-token"
	maxTokenLife = 365 * 24 * time.Hour
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

// withKubernetes calls do with a client of the cluster's administrator.
func (s *nodeService) withKubernetes(do func(*config.Config, *kubeclient.Client) error) error {
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

func (s *nodeService) CreateToken(ctx context.Context, req *connect.Request[apiv1.CreateTokenRequest]) (*connect.Response[apiv1.CreateTokenResponse], error) {
	life := req.Msg.GetTtl().AsDuration()
	if life < time.Minute || life > maxTokenLife {
		return nil, failed(connect.CodeInvalidArgument, "a token for %s: it must be for %s to %s", life, time.Minute, maxTokenLife)
	}
	token, end := string(config.NewToken()), time.Now().Add(life)
	id, secret, _ := strings.Cut(token, ".")
	err := s.withKubernetes(func(_ *config.Config, c *kubeclient.Client) error {
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

func (s *nodeService) ListTokens(ctx context.Context, _ *connect.Request[apiv1.ListTokensRequest]) (*connect.Response[apiv1.ListTokensResponse], error) {
	res := &apiv1.ListTokensResponse{}
	return connect.NewResponse(res), s.withKubernetes(func(cfg *config.Config, c *kubeclient.Client) error {
		list, err := c.List(ctx, tokenRef(""), kubeclient.Selection{Fields: "type=" + tokenType})
		for _, o := range list.Items() {
			token := &apiv1.JoinToken{Id: strings.TrimPrefix(o.Name(), tokenName), Description: tokenText(o, "description")}
			if end := tokenEnd(o); !end.IsZero() {
				token.Ends = timestamppb.New(end)
			}
			if strings.HasPrefix(string(cfg.Cluster.Token), token.Id+".") {
				token.Description = "cluster.token of this node"
			}
			res.Tokens = append(res.Tokens, token)
		}
		return err
	})
}

func (s *nodeService) RevokeToken(ctx context.Context, req *connect.Request[apiv1.RevokeTokenRequest]) (*connect.Response[apiv1.RevokeTokenResponse], error) {
	id, end := req.Msg.GetId(), time.Now().Add(max(req.Msg.GetAfter().AsDuration(), 0))
	err := s.withKubernetes(func(_ *config.Config, c *kubeclient.Client) error {
		o, err := c.Get(ctx, tokenRef(tokenName+id))
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
