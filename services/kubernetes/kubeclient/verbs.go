package kubeclient

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"net/url"
)

// Content types of PATCH.
const (
	typeApply = "application/apply-patch+yaml" // JSON is YAML
	typeMerge = "application/merge-patch+json"
)

// Ref names an object, or with an empty Name the objects of a kind. An empty
// Namespace of a kind that lives in one means all of them.
type Ref struct {
	APIVersion, Kind, Namespace, Name string
}

func (r Ref) object() Object {
	return Object{"apiVersion": r.APIVersion, "kind": r.Kind, "metadata": map[string]any{"name": r.Name}}
}

func (r Ref) String() string { return r.object().String() }

// mappingOf names the object in the error, as it is the first thing that fails
// while the control plane isn't up.
func (c *Client) mappingOf(ctx context.Context, r Ref) (Mapping, error) {
	m, err := c.Mapping(ctx, r.APIVersion, r.Kind)
	if err != nil {
		err = fmt.Errorf("error creating mapping for object %s: %w", r, err)
	}
	return m, err
}

// about sends a request about an object that r names, which doesn't exist yet if the method is
// POST, or the objects of a kind.
func (c *Client) about(ctx context.Context, verb string, r Ref, req request) (out Object, err error) {
	m, err := c.mappingOf(ctx, r)
	if err != nil {
		return nil, err
	}
	if req.path = m.path(r.Namespace, r.Name) + req.sub; req.method == http.MethodPost && req.sub == "" {
		req.path = m.path(cmp.Or(r.Namespace, defaultNamespace), "")
	}
	if err := c.do(ctx, req, &out); err != nil {
		return nil, fmt.Errorf("%s %s: %w", verb, r, err)
	}
	return out, nil
}

// Get reads one object.
func (c *Client) Get(ctx context.Context, r Ref) (Object, error) {
	return c.about(ctx, "get", r, request{method: http.MethodGet})
}

// Selection narrows a list or a watch; the zero value takes everything.
type Selection struct {
	Labels string // "k8s-app=kube-dns"
	Fields string // "spec.nodeName=n1"
}

func (s Selection) query() url.Values {
	q := url.Values{}
	if s.Labels != "" {
		q.Set("labelSelector", s.Labels)
	}
	if s.Fields != "" {
		q.Set("fieldSelector", s.Fields)
	}
	return q
}

// List reads the objects of a kind: a list object, see Object.Items.
func (c *Client) List(ctx context.Context, r Ref, s Selection) (Object, error) {
	return c.about(ctx, "list", r, request{method: http.MethodGet, query: s.query()})
}

// Metadata is a list of all objects of a kind without their content, of which there may be too much.
func (c *Client) Metadata(ctx context.Context, r Ref) (Object, error) {
	return c.about(ctx, "list", r, request{method: http.MethodGet, accept: "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"})
}

// Create makes a new object; IsAlreadyExists(err) where there is one.
func (c *Client) Create(ctx context.Context, o Object) (Object, error) {
	return c.about(ctx, "create", o.Ref(), request{method: http.MethodPost, query: url.Values{"fieldManager": {FieldManager}}, body: o})
}

// CreateIfMissing leaves an object that exists as it is, and says whether it had
// to be made.
func (c *Client) CreateIfMissing(ctx context.Context, o Object) (created bool, err error) {
	missing, err := c.Missing(ctx, o)
	if err != nil || !missing {
		return false, err
	}
	if _, err = c.Create(ctx, o); IsAlreadyExists(err) {
		return false, nil // another control plane node was quicker
	}
	return err == nil, err
}

// Missing says whether there is no object of o's name, or no kind of it.
func (c *Client) Missing(ctx context.Context, o Object) (bool, error) {
	_, err := c.Get(ctx, o.Ref())
	return IsNotFound(err), IgnoreNotFound(err)
}

// Apply makes the fields of o so (server-side apply), creating the object if it is
// missing. It takes over fields that somebody else owns.
func (c *Client) Apply(ctx context.Context, o Object) (Object, error) {
	query := url.Values{"fieldManager": {FieldManager}, "force": {"true"}}
	return c.about(ctx, "apply", o.Ref(), request{method: http.MethodPatch, query: query, content: typeApply, body: o})
}

// Preview is what Apply with force would make of o. It changes nothing.
func (c *Client) Preview(ctx context.Context, o Object) (Object, error) {
	query := url.Values{"fieldManager": {FieldManager}, "force": {"true"}, "dryRun": {"All"}}
	return c.about(ctx, "preview", o.Ref(), request{method: http.MethodPatch, query: query, content: typeApply, body: o})
}

// Merge changes an object that exists by a JSON merge patch (RFC 7396).
func (c *Client) Merge(ctx context.Context, r Ref, patch Object) (Object, error) {
	return c.about(ctx, "patch", r, request{method: http.MethodPatch, query: url.Values{"fieldManager": {FieldManager}}, content: typeMerge, body: patch})
}

// Delete removes an object and lets what it owns be collected. One that is
// already gone is no error.
func (c *Client) Delete(ctx context.Context, r Ref) error { return c.delete(ctx, r, "Background") }

// Orphan removes an object like Delete, and leaves what it owns
// (https://kubernetes.io/docs/concepts/architecture/garbage-collection/#orphaned-dependents).
func (c *Client) Orphan(ctx context.Context, r Ref) error { return c.delete(ctx, r, "Orphan") }

func (c *Client) delete(ctx context.Context, r Ref, propagation string) error {
	body := Object{"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": propagation}
	_, err := c.about(ctx, "delete", r, request{method: http.MethodDelete, body: body})
	return IgnoreNotFound(err)
}

// Evict asks for the end of a pod within the disruption budgets; where they don't allow
// it now, the error is a *StatusError that names them. One that is gone is no error, nor
// is another pod of its name that has come meanwhile, on another node perhaps.
func (c *Client) Evict(ctx context.Context, pod Object) error {
	body := Object{
		"apiVersion": "policy/v1", "kind": "Eviction",
		"metadata":      map[string]any{"namespace": pod.Namespace(), "name": pod.Name()},
		"deleteOptions": map[string]any{"preconditions": map[string]any{"uid": pod.Text("metadata", "uid")}},
	}
	ref := Ref{APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace(), Name: pod.Name()}
	_, err := c.about(ctx, "evict", ref, request{method: http.MethodPost, sub: "/eviction", body: body})
	if IsConflict(err) {
		return nil
	}
	return IgnoreNotFound(err)
}

// What is decided about a CertificateSigningRequest.
const (
	Approved = "Approved"
	Denied   = "Denied"
)

// DecideCSR approves or denies a CertificateSigningRequest, with a reason code if there is one; one that already is,
// stays so.
func (c *Client) DecideCSR(ctx context.Context, name, decision, code, message string) error {
	ref := Ref{APIVersion: "certificates.k8s.io/v1", Kind: "CertificateSigningRequest", Name: name}
	csr, err := c.Get(ctx, ref)
	if err != nil || csr.Condition(Approved) || csr.Condition(Denied) {
		return err
	}
	conditions, _ := csr.At("status", "conditions").([]any)
	csr["status"] = map[string]any{"conditions": append(conditions, map[string]any{
		"type": decision, "status": "True", "reason": cmp.Or(code, "Garboard"+decision), "message": message,
	})}
	_, err = c.about(ctx, "decide about", ref, request{method: http.MethodPut, sub: "/approval", body: csr})
	return err
}
