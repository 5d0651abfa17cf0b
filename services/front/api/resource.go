package api

import (
	"bytes"
	"context"
	"encoding/base64"
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"

	"connectrpc.com/connect"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/tree"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/resource"
	"gopkg.in/yaml.v3"
)

// resourceService is the store, to look at.
type resourceService struct {
	opts  Options
	shown shown
}

// find resolves the name of a type, and checks the request for it.
func find(req *apiv1.ListResourcesRequest) (resource.Definition, error) {
	if req.GetType() == "" {
		return resource.Definition{}, failed(connect.CodeInvalidArgument, "which type of resource? gbctl get rd lists them")
	}
	d, err := resource.Resolve(req.GetType())
	if err != nil {
		return d, connect.NewError(connect.CodeNotFound, err)
	}
	return d, nil
}

func (s *resourceService) List(_ context.Context, req *connect.Request[apiv1.ListResourcesRequest]) (*connect.Response[apiv1.ListResourcesResponse], error) {
	d, err := find(req.Msg)
	if err != nil {
		return nil, err
	}
	res := &apiv1.ListResourcesResponse{Definition: definition(d)}
	var others []string
	for _, o := range s.opts.Store.Objects(d.Type, req.Msg.GetNamespace()) {
		if id := req.Msg.GetId(); id != "" && id != o.ID {
			others = append(others, o.ID)
			continue
		}
		item, err := s.object(d, o)
		if err != nil {
			return nil, err
		}
		res.Items = append(res.Items, item)
	}
	if id := req.Msg.GetId(); id != "" && len(res.Items) == 0 {
		return nil, failed(connect.CodeNotFound, "%s %q isn't there%s; %s", d.Kind, shortened(readable(id)), in(req.Msg.GetNamespace()), there(others))
	}
	return connect.NewResponse(res), nil
}

func in(namespace string) string {
	if namespace == "" {
		return ""
	}
	return " in namespace " + shortened(readable(namespace))
}

// there lists the existing IDs, for a request with an unknown one.
func there(ids []string) string {
	const most = 20 // more than that isn't read
	switch n := len(ids); {
	case n == 0:
		return "there is none of that type"
	case n > most:
		return "there are " + strings.Join(ids[:most], ", ") + " and more"
	}
	return "there are " + strings.Join(ids, ", ")
}

// Watch sends as fast as the caller reads; meanwhile the store merges what comes.
func (s *resourceService) Watch(ctx context.Context, req *connect.Request[apiv1.ListResourcesRequest], stream *connect.ServerStream[apiv1.ResourceEvent]) error {
	d, err := find(req.Msg)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // the store's side ends with it
	first := definition(d)
	for e := range s.opts.Store.Events(ctx, d.Type, req.Msg.GetNamespace(), req.Msg.GetId()) {
		event := &apiv1.ResourceEvent{Kind: enum[apiv1.ResourceEvent_Kind](apiv1.ResourceEvent_Kind_value, "KIND_", e.Kind.String()), Definition: first}
		first = nil
		if e.Kind != resource.Synced {
			if event.Resource, err = s.object(d, e.Object); err != nil {
				return err
			}
		}
		if err := stream.Send(event); err != nil {
			return err
		}
	}
	return context.Cause(ctx)
}

func (s *resourceService) Definitions(context.Context, *connect.Request[apiv1.ListDefinitionsRequest]) (*connect.Response[apiv1.ListDefinitionsResponse], error) {
	return connect.NewResponse(&apiv1.ListDefinitionsResponse{Definitions: lists.Of(resource.Definitions(), definition)}), nil
}

func (s *resourceService) Graph(_ context.Context, req *connect.Request[apiv1.GraphRequest]) (*connect.Response[apiv1.GraphResponse], error) {
	var dot strings.Builder
	draw := s.opts.Runtime.Graph
	if req.Msg.GetServices() {
		draw = s.opts.Graph.DOT
	}
	err := draw(&dot)
	return connect.NewResponse(&apiv1.GraphResponse{Dot: dot.String()}), err
}

func definition(d resource.Definition) *apiv1.ResourceDefinition {
	columns := lists.Of(d.Columns, func(c resource.Column) string { return c.Name })
	return &apiv1.ResourceDefinition{Type: d.Type, Kind: d.Kind, Aliases: d.Aliases, DefaultNamespace: d.Namespace, Columns: columns}
}

// object is an object as a caller may see it.
func (s *resourceService) object(d resource.Definition, o resource.Object[any]) (*apiv1.Resource, error) {
	spec, columns, err := s.shown.of(d, o)
	if err != nil {
		return nil, err
	}
	for i, c := range d.Columns {
		if c.From == "" {
			continue
		}
		if other, err := s.opts.Store.Object(c.From, o.Namespace, o.ID); err == nil {
			columns = slices.Clone(columns) // the kept ones are everybody's
			columns[i] = cell(c, other.Spec)
		}
	}
	return &apiv1.Resource{
		Namespace: readable(o.Namespace), Type: o.Type, Kind: d.Kind, Id: readable(o.ID), Version: o.Version, Phase: resource.Phase,
		Finalizers: o.Finalizers, Owner: o.Owner, Spec: spec, Columns: columns, Created: timestamp(o.Created), ProblemsSince: timestamp(o.Troubled),
	}, nil
}

const (
	// specIndent is the indentation of a spec.
	specIndent = 4
	// hidden stands for what isn't shown, as the types of package config have it.
	hidden = "(secret)"
)

// maxShown bounds how many objects' texts are kept; a control plane has about
// fifty, of two hundred kilobytes in all. Those of objects that are gone go when
// it is reached.
const maxShown = 512

// shown keeps what was made of objects for their readers: two hundred at once ask
// for the same, and making it takes longer than sending it.
type shown struct {
	mu      sync.Mutex // guards objects
	objects map[resourceName]*shownObject
}

type resourceName struct{ typ, namespace, id string }

// shownObject is made of a spec once.
type shownObject struct {
	spec    any
	once    sync.Once
	text    string
	columns []string
	err     error
}

// of is an object as its readers see it: YAML, and the columns of a table.
func (s *shown) of(d resource.Definition, o resource.Object[any]) (text string, columns []string, err error) {
	c := s.object(o)
	c.once.Do(func() {
		// should this panic
		c.err = fmt.Errorf("show %s %s/%s: a defect of the node: it is in the log %q", o.Type, o.Namespace, o.ID, LogID)
		for _, column := range d.Columns {
			value := ""
			if column.From == "" {
				value = cell(column, o.Spec)
			}
			c.columns = append(c.columns, value)
		}
		c.text, c.err = specYAML(o)
	})
	return c.text, c.columns, c.err
}

// cell is a column's value as its readers see it.
func cell(c resource.Column, spec any) string {
	value := readable(c.Value(spec))
	if privateKey(value) {
		return hidden
	}
	return value
}

// object is what is kept for an object, or is going to be. Specs don't change in
// place, so comparing one with itself is quick.
func (s *shown) object(o resource.Object[any]) *shownObject {
	s.mu.Lock()
	defer s.mu.Unlock()
	name := resourceName{o.Type, o.Namespace, o.ID}
	if c := s.objects[name]; c != nil && reflect.DeepEqual(c.spec, o.Spec) {
		return c
	}
	if s.objects == nil || len(s.objects) >= maxShown {
		s.objects = make(map[resourceName]*shownObject)
	}
	c := &shownObject{spec: o.Spec}
	s.objects[name] = c
	return c
}

// specYAML is an object's spec as readers of the API get it. Secrets hide
// themselves by their types; two kinds of them have none, and are looked for
// here: those of Kubernetes objects, and private keys in any text.
func specYAML(o resource.Object[any]) (string, error) {
	node, err := specNode(o.Spec)
	if err != nil {
		return "", fmt.Errorf("show %s %s/%s: %w", o.Type, o.Namespace, o.ID, err)
	}
	hide(node)
	text, err := tree.Encode(node, specIndent)
	if err != nil {
		return "", fmt.Errorf("show %s %s/%s: %w", o.Type, o.Namespace, o.ID, err)
	}
	return string(text), nil
}

func specNode(spec any) (*yaml.Node, error) {
	node := new(yaml.Node)
	if c, ok := spec.(*config.Config); ok && c != nil {
		// As the document has it: without all the fields that aren't set.
		text, err := c.Encode()
		if err != nil {
			return nil, err
		}
		if text, err = config.Redact(text); err != nil {
			return nil, err
		}
		if err := yaml.Unmarshal(text, node); err != nil {
			return nil, err
		}
		return tree.Plain(node), nil // comments are for people who edit the document
	}
	return node, node.Encode(spec)
}

// hide replaces private keys. What Secrets of Kubernetes hold, their type hides.
func hide(n *yaml.Node) {
	if n.Kind == yaml.ScalarNode && privateKey(n.Value) {
		n.SetString(hidden)
	}
	for _, inner := range n.Content {
		hide(inner)
	}
}

const (
	pemBegin = "-----BEGIN "
	pemKey   = "PRIVATE KEY-----"
)

// base64PEM is base64 of PEM, in lines or not.
var base64PEM = regexp.MustCompile(`LS0tLS1CRUdJTi[A-Za-z0-9+/ \t\n\r]*`)

// privateKey reports whether a text has a private key, as PEM or as base64 of it.
func privateKey(text string) bool {
	if strings.Contains(text, pemBegin) && strings.Contains(text, pemKey) {
		return true
	}
	return slices.ContainsFunc(base64PEM.FindAllString(text, -1), func(found string) bool {
		// What was decoded up to an error counts: words may follow the PEM.
		decoded, _ := base64.RawStdEncoding.DecodeString(strings.Join(strings.Fields(found), ""))
		return bytes.Contains(decoded, []byte(pemKey))
	})
}
